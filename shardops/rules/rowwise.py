"""The sharding rule of ops that work along the last dim: norms, and sums over rows."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np

from shardops.rules.layouts import Layouts, layouts_of
from shardops.rules.moves import MOST_AXES, as_numbers, move, sum_first, units
from shardops.rules.spec import (
    Axes,
    AxisSizes,
    Sizes,
    Spec,
    axes_in,
    even,
    local_shape,
    only,
    shards,
)
from shardops.rules.step import Step

Stats = Literal["auto", "gather", "distributed"]


@dataclass(frozen=True)
class RowwiseCall:
    """An op along the last dim of [*rows, h], as its plan sees it."""

    shape: tuple[int, ...]
    itemsizes: tuple[int, ...]  # of the row-shaped operands
    results: tuple[int, ...]  # bytes of an element of each row-shaped result
    sums: tuple[int, ...] = (1,)  # float32 numbers a row in each sum that combines statistics
    parameters: int = 0  # how many [h] sums over rows, in float32
    unreduced: Axes = ()  # axes over which these are to stay unreduced, all of them or none
    main: int = 0  # the operand whose layout the results have where none is wanted


@dataclass(frozen=True)
class RowwisePlan:
    """How an op along the last dim runs on a mesh."""

    rows: Spec  # of every row-shaped operand while the op runs
    hidden: Axes  # axes that shard h meanwhile: statistics are combined over them
    results: tuple[Spec, ...]  # where each row-shaped result ends
    departures: tuple[tuple[Step, ...], ...]  # and how it gets there
    statistics: tuple[Step, ...]  # the sums that combine statistics, [*rows]
    parameter_out: Spec  # of a sum over rows, [h]: a parameter's gradient
    parameter_steps: tuple[Step, ...]
    unreduced: Axes  # axes over which that sum is still to come

    @property
    def x(self) -> Spec:
        return (*self.rows, self.hidden)

    @property
    def gamma(self) -> Spec:
        return (self.hidden,)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What the op itself moves, its operands apart."""
        moved = (s for way in self.departures for s in way)
        return (*self.statistics, *moved, *self.parameter_steps)


@lru_cache(maxsize=4096)
def plan_rowwise(
    call: RowwiseCall,
    offered: tuple[Spec, ...],
    axis_sizes: AxisSizes,
    stats: Stats = "auto",
    wanted: tuple[Spec | None, ...] = (None,),
    parameter_wanted: Spec | None = None,
) -> RowwisePlan:
    """Plan an op along the last dim.

    While it runs, rows lie in any way; the last dim is whole, or sharded where statistics may be
    combined over the mesh (`distributed`, which keeps it so, and `auto`). Of these layouts the one
    that moves the fewest bytes, operands, statistics and results together; of equals the one that
    does the least work on a device.

    Args:
      call: the op.
      offered: the shardings of its row-shaped operands.
      axis_sizes: (mesh axis, devices along it) pairs.
      stats: what happens where the last dim is sharded.
      wanted: the sharding wanted of each row-shaped result; None: that of the main operand, its
        last dim whole with `gather`.
      parameter_wanted: the sharding wanted of a sum over rows.
    """
    sizes = dict(axis_sizes)
    taken = tuple(even(call.shape, s, sizes) for s in offered)
    usual = (*taken[call.main][:-1], () if stats == "gather" else taken[call.main][-1])
    ends = tuple(
        usual if w is None else even(call.shape, w, sizes)
        for w in (*wanted, *[None] * (len(call.results) - len(wanted)))
    )
    at = _layout(call, taken, ends, sizes, stats, parameter_wanted)
    rows, hidden = at[:-1], at[-1]
    unreduced = open_sums(call.unreduced, axes_in(rows), parameter_wanted or ())
    summed, parameter_out = tuple(a for a in axes_in(rows) if a not in unreduced), (hidden,)
    departures = tuple(
        move(call.shape, at, end, axis_sizes, size, "result", bool(unreduced))
        for end, size in zip(ends, call.results, strict=True)
    )
    if parameter_wanted is not None:
        parameter_out = even(call.shape[-1:], parameter_wanted, sizes)
    parameter_steps: tuple[Step, ...] = ()
    if call.parameters:
        parameter_steps = sum_first(
            call.shape[-1:],
            (hidden,),
            summed,
            parameter_out,
            axis_sizes,
            4 * call.parameters,
            "parameter",
            bool(unreduced),
        )
    return RowwisePlan(
        rows,
        hidden,
        ends,
        departures,
        _statistics(call, at, sizes),
        parameter_out,
        parameter_steps,
        unreduced,
    )


def open_sums(asked: Axes, summed: Axes, wanted: Spec) -> Axes:
    """Of the axes over which a sum is asked to stay open: all, where all of them are summed."""
    possible = {*asked} <= {*summed} and not {*asked} & {*axes_in(wanted)}
    return asked if possible else ()


def _statistics(call: RowwiseCall, at: Spec, sizes: Sizes) -> tuple[Step, ...]:
    if not at[-1]:
        return ()
    n, rows = shards(at[-1], sizes), at[:-1]
    each = 2 * 4 * prod(local_shape(call.shape[:-1], rows, sizes)) * (n - 1) / n
    return tuple(
        Step("psum", at[-1], rows, rows, each * numbers, "statistics") for numbers in call.sums
    )


def _layout(
    call: RowwiseCall,
    taken: tuple[Spec, ...],
    ends: tuple[Spec, ...],
    sizes: Sizes,
    stats: Stats,
    parameter_wanted: Spec | None,
) -> Spec:
    """Where the row-shaped operands lie while the op runs."""
    named = {a for spec in (*taken, *ends) for a in axes_in(spec)}
    axes = tuple(a for a, n in sizes.items() if a in named and n > 1)
    if len(axes) > MOST_AXES:
        spec = list(only(taken[call.main], axes))
        spec[-1] = () if stats == "gather" else spec[-1]
        return tuple(spec)
    graph = layouts_of(units(call.shape, axes, sizes), tuple(sizes[a] for a in axes))

    def number(spec: Spec) -> int:
        return graph.index[*(as_numbers(d, axes) for d in spec), ()]

    elements = prod(call.shape)
    cost = np.zeros(len(graph.nodes))
    for spec, size in zip(taken, call.itemsizes, strict=True):
        cost += elements * size * graph.costs_from(frozenset([number(spec)]))
    for end, size in zip(ends, call.results, strict=True):
        cost += elements * size * graph.costs_to(frozenset([number(end)]))
    scattered = {*axes_in(parameter_wanted or ())}
    hidden_taken = as_numbers(taken[call.main][-1], axes)
    for n, node in enumerate(graph.nodes):
        hidden = node[-2]
        allowed = not hidden if stats == "gather" else hidden == hidden_taken or stats == "auto"
        if not allowed:
            cost[n] = np.inf
            continue
        at = tuple(tuple(axes[a] for a in d) for d in node[:-1])
        cost[n] += sum(s.bytes for s in _statistics(call, at, sizes))
        rows = axes_in(at[:-1])
        if call.parameters and rows:
            parts = shards(rows, sizes)
            once = 4 * call.parameters * call.shape[-1] / shards(at[-1], sizes)
            cost[n] += once * (parts - 1) / parts * (1 if {*rows} <= scattered else 2)
    return _first_of_least(cost, graph, axes)


def _first_of_least(cost: np.ndarray, graph: Layouts, axes: Axes) -> Spec:
    near = np.flatnonzero(cost <= cost.min() * (1 + 1e-5) + 1e-9)
    order = np.lexsort((cost[near], graph.held[near]))
    return tuple(tuple(axes[a] for a in d) for d in graph.nodes[near[order[0]]][:-1])


@dataclass(frozen=True)
class RowSumPlan:
    """How a sum over the leading dims runs on a mesh."""

    operand: Spec
    out: Spec
    steps: tuple[Step, ...]
    unreduced: Axes


@lru_cache(maxsize=4096)
def plan_row_sum(
    shape: tuple[int, ...],
    spec: Spec,
    kept: int,
    rows: int,
    axis_sizes: AxisSizes,
    wanted: Spec | None = None,
    unreduced: Axes = (),
) -> RowSumPlan:
    """Plan the sum over `rows` dims of an array after its first `kept` (a bias's gradient)."""
    sizes = dict(axis_sizes)
    operand = even(shape, spec, sizes)
    end = kept + rows
    partial, rest = operand[:kept] + operand[end:], shape[:kept] + shape[end:]
    out = partial if wanted is None else even(rest, wanted, sizes)
    summed = tuple(a for a in axes_in(operand[kept:end]) if sizes[a] > 1)
    unreduced = open_sums(unreduced, summed, out)
    summed = tuple(a for a in summed if a not in unreduced)
    steps = sum_first(rest, partial, summed, out, axis_sizes, 4, "out", bool(unreduced))
    return RowSumPlan(operand, out, steps, unreduced)
