"""The search behind a product's plan: all layouts of the product, each with what it costs."""

from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from shardops.rules.gemm_dims import Dims, GemmDims
from shardops.rules.hardware import DEFAULT
from shardops.rules.moves import MOST_AXES, as_numbers, units
from shardops.rules.parts import part_sizes, split
from shardops.rules.product_layouts import LoopNest, ProductLayouts, product_layouts
from shardops.rules.spec import Axes, Sizes, Spec, axes_in

# With few axes or few loops every loop is searched; else, of loops that no spec names, one a kind.
_MANY_AXES, _MANY_LOOPS = 3, 5

SLACK = 0.05
ROUNDING = 1e-5  # of times, and the small weights that count collectives


@dataclass(frozen=True)
class Problem:
    """What a search is given. Specs name axes of `axes` only and divide their arrays."""

    dims: GemmDims
    axes: Axes
    sizes: Sizes
    lhs: frozenset[Spec]  # where the operand is to be had; steps between these are not counted
    rhs: frozenset[Spec]
    target: Spec | None  # of the result; None: any
    unreduced: Axes = ()
    blocks: tuple[Dims | None, Dims | None] = (None, None)
    itemsizes: tuple[float, float, float] = (2, 2, 2)  # lhs, rhs, result
    whole: bool = False  # whether arrays move over whole axes only


class NoLayoutError(Exception):
    """No layout of the product leads to the result that is wanted."""


class Choice(NamedTuple):
    """The layout of the product that costs least: the axes of each of the loops of `dims`."""

    loops: tuple[Axes, ...]
    target: Spec  # of the result


def cheapest(problem: Problem) -> Choice:
    """The layout of least cost: bytes over the link and operations, as time.

    Of equals the one with fewer operations a device. Of those that cost up to a twentieth more and
    no more operations, the one with the fewest collectives, since each has a latency that does not
    depend on sizes. Then the cheaper one, then the one with the more sharded result.
    """
    dims, kept = problem.dims, _kept_loops(problem)
    nest = _nest(problem, kept)
    layouts = product_layouts(nest)
    lhs = layouts.lhs_layouts.costs_from(_numbers(problem, nest, 0, kept))
    rhs = layouts.rhs_layouts.costs_from(_numbers(problem, nest, 1, kept))
    out_graph = layouts.out_layouts
    if problem.target is None:
        targets = frozenset(layouts.ends)
    else:
        targets = frozenset([out_graph.index[_out_node(problem, nest, problem.target, kept)]])
    out = out_graph.costs_to(targets)

    elements = [prod(dims.lhs_shape), prod(dims.rhs_shape), prod(dims.out_shape)]
    weights = [n * b for n, b in zip(elements, problem.itemsizes, strict=True)]
    moved = (
        weights[0] * lhs[layouts.lhs]
        + weights[1] * rhs[layouts.rhs]
        + weights[2] * out[layouts.out]
    )
    flops = operations(dims) * layouts.work
    time = moved / DEFAULT.bandwidth + flops / DEFAULT.peak
    collectives = (
        layouts.lhs_layouts.collectives(lhs)[layouts.lhs]
        + layouts.rhs_layouts.collectives(rhs)[layouts.rhs]
        + out_graph.collectives(out)[layouts.out]
    )
    sharded = out_graph.held[layouts.out]
    time = np.where(_worthwhile(problem, layouts, moved, time), time, np.inf)
    if not np.isfinite(time).any():
        raise NoLayoutError
    best = _preferred(time, flops, collectives, sharded)
    axes_of = [tuple(problem.axes[a] for a in loop) for loop in layouts.loops[best]]
    loops: list[Axes] = [()] * len(dims.loops)
    for n, axes in zip(kept, axes_of, strict=True):
        loops[n] = axes
    if problem.target is not None:
        return Choice(tuple(loops), problem.target)
    # Any result will do: the cheapest end of the partial result's path.
    edges = out_graph.path(int(layouts.out[best]), targets)
    last = out_graph.index[edges[-1].after] if edges else int(layouts.out[best])
    ended: list[Axes] = [()] * len(dims.out_shape)
    for n, axes in zip(kept, layouts.ends[last], strict=False):
        ended[n] = tuple(problem.axes[a] for a in axes)
    return Choice(tuple(loops), tuple(ended))


def operations(dims: GemmDims) -> float:
    """Multiplications and additions of the whole product."""
    return 2.0 * prod(dims.out_shape) * prod(dims.lhs_shape[i] for i in dims.lhs_k)


def _worthwhile(
    problem: Problem, layouts: ProductLayouts, moved: np.ndarray, time: np.ndarray
) -> np.ndarray:
    """Which layouts come into question.

    Axes that neither operands nor result name could share out the work too, at the price of
    gathering the result. They do where that moves no more than leaving them idle.
    """
    specs = [*problem.lhs, *problem.rhs, problem.target or (), (problem.unreduced,)]
    named = {a for spec in specs for a in axes_in(spec)}
    idle = {n for n, a in enumerate(problem.axes) if a not in named}
    if not idle:
        return np.ones(len(layouts.loops), bool)
    as_usual = np.array([not any(a in idle for d in loops for a in d) for loops in layouts.loops])
    usual = np.where(as_usual, time, np.inf)
    if not np.isfinite(usual).any():  # it takes such an axis to leave a sum open
        return np.ones(len(layouts.loops), bool)
    return as_usual | (moved <= moved[usual.argmin()] * (1 + ROUNDING))


def _preferred(
    time: np.ndarray, flops: np.ndarray, collectives: np.ndarray, sharded: np.ndarray
) -> int:
    least = time.min()
    fewest = flops[time <= least * (1 + ROUNDING) + 1e-30].min()
    near = np.flatnonzero((time <= least * (1 + SLACK) + 1e-30) & (flops <= fewest + 0.5))
    order = np.lexsort((near, sharded[near], time[near], collectives[near]))
    return int(near[order[0]])


def _kept_loops(problem: Problem) -> tuple[int, ...]:
    """The loops that are searched, in order."""
    dims = problem.dims
    everything = tuple(range(len(dims.loops)))
    if len(problem.axes) < _MANY_AXES or len(dims.loops) <= _MANY_LOOPS:
        return everything
    named: set[int] = set()
    fresh: dict[tuple[bool, bool, bool], list[int]] = {}
    for n, (i, j) in enumerate(dims.loops):
        lies = [s[i] for s in problem.lhs] if i is not None else []
        lies += [s[j] for s in problem.rhs] if j is not None else []
        summed = n >= len(dims.out_shape)
        if problem.target is not None and not summed:
            lies.append(problem.target[n])
        if any(lies):
            named.add(n)
        else:
            fresh.setdefault((i is None, j is None, summed), []).append(n)
    cut = _loop_units(problem)
    for loops in fresh.values():
        named.add(max(loops, key=lambda n: cut[n]))
    return tuple(n for n in everything if n in named)


def _loop_units(problem: Problem) -> tuple[int, ...]:
    """Into how many parts each loop may be cut: whole blocks of both operands."""
    dims, blocks = problem.dims, problem.blocks
    both: list[int] = []
    for i, j in dims.loops:
        lengths = []
        for d, shape, block in ((i, dims.lhs_shape, blocks[0]), (j, dims.rhs_shape, blocks[1])):
            if d is not None:
                unit = block[d] if block else 1
                lengths.append(shape[d] // unit if shape[d] % unit == 0 else 1)
        both += units((gcd(*lengths),), problem.axes, problem.sizes)
    return tuple(both)


def _nest(problem: Problem, kept: tuple[int, ...]) -> LoopNest:
    dims = problem.dims
    place = {n: at for at, n in enumerate(kept)}
    cut = _loop_units(problem)
    sides = []
    for side, shape in ((0, dims.lhs_shape), (1, dims.rhs_shape)):
        loops = [n for n in kept if dims.loops[n][side] is not None]
        lengths = [shape[d] for n in loops if (d := dims.loops[n][side]) is not None]
        sides.append((tuple(place[n] for n in loops), units(lengths, problem.axes, problem.sizes)))
    shape = dims.out_shape
    out = units([shape[n] for n in kept if n < len(shape)], problem.axes, problem.sizes)
    sizes = tuple((a, problem.sizes[a]) for a in problem.axes)
    parts = (None if problem.whole else split(sizes, MOST_AXES)) or {a: (a,) for a, _ in sizes}
    fine = part_sizes(sizes, parts)
    names = [p for p, _ in fine]
    return LoopNest(
        tuple(cut[n] for n in kept),
        tuple(n for _, n in sizes),
        tuple(tuple(names.index(p) for p in parts[a]) for a in problem.axes),
        tuple(n for _, n in fine),
        sides[0][0],
        sides[1][0],
        sides[0][1],
        sides[1][1],
        out,
        sum(n >= len(shape) for n in kept),
    )


def _numbers(problem: Problem, nest: LoopNest, side: int, kept: tuple[int, ...]) -> frozenset[int]:
    """Where an operand is to be had, by number. Its dims there are in the order of the loops."""
    layouts = product_layouts(nest)
    graph = layouts.rhs_layouts if side else layouts.lhs_layouts
    given = problem.rhs if side else problem.lhs
    loops = problem.dims.loops
    dims = [d for n in kept if (d := loops[n][side]) is not None]
    return frozenset(
        graph.index[*(nest.parted(as_numbers(spec[d], problem.axes)) for d in dims), ()]
        for spec in given
    )


def _out_node(
    problem: Problem, nest: LoopNest, target: Spec, kept: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    dims = [n for n in kept if n < len(target)]
    pending = nest.parted(as_numbers(problem.unreduced, problem.axes))
    return (
        *(nest.parted(as_numbers(target[n], problem.axes)) for n in dims),
        tuple(sorted(pending)),
    )
