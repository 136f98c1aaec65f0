"""The sharding rule of a matrix product: where operands lie, and what is summed over the mesh.

Pure: shapes, specs and axis sizes in, a `GemmPlan` out. No arrays and no devices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Literal

from shardops.errors import shown
from shardops.rules.gemm_check import (
    checked_blocks,
    checked_dims,
    checked_mesh,
    checked_spec,
)
from shardops.rules.gemm_dims import Dims, GemmDims, GemmPlan
from shardops.rules.gemm_narrow import search
from shardops.rules.gemm_search import Choice, NoLayoutError, Problem, operations
from shardops.rules.hardware import DEFAULT
from shardops.rules.moves import MOST_AXES, move, sum_and_move
from shardops.rules.spec import (
    Axes,
    AxisSizes,
    Sizes,
    Spec,
    axes_in,
    cut_before,
    even,
    only,
    shards,
)
from shardops.rules.step import Step

Itemsizes = tuple[float, float, float]


def plan_gemm(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    lhs_spec: Iterable[object] | None,
    rhs_spec: Iterable[object] | None,
    axis_sizes: Sizes,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    batch_dims: tuple[Sequence[int], Sequence[int]] = ((), ()),
    lhs_block: Sequence[int] | None = None,
    rhs_block: Sequence[int] | None = None,
    out_spec: Iterable[object] | Literal["cheapest"] | None = None,
    itemsizes: Itemsizes = (2, 2, 2),
) -> GemmPlan:
    """Plan the product of sharded operands.

        out[lhs free, rhs free] = sum_k lhs[.., k, ..] rhs[.., k, ..]

    Each mesh axis shards a free dim of either operand, a contracting pair, or nothing, while the
    product runs; operands are cut, gathered, moved between dims or permuted to get there; the
    partial result is summed (all-reduce or reduce-scatter) and moved in the same ways. Of all of
    these the plan of least time: bytes over the link (ring algorithms) and operations, both at the
    rates of `rules.hardware`. Ties: fewer operations a device, then fewer collectives, then the
    more sharded result. Exact for up to three mesh axes that do not lie alike everywhere; beyond
    that some are gathered first.

    Args:
      lhs_shape, rhs_shape: global shapes.
      lhs_spec, rhs_spec: the shardings offered: PartitionSpecs, tuples of their entries, or None.
      axis_sizes: mesh axis name -> number of devices along it.
      contracting_dims: the contracted dims of lhs and rhs, paired in order. Negative dims count
        from the end.
      batch_dims: batch-like dims (batch, or sequence in data parallelism) of lhs and rhs. No
        batched product: they keep a mesh axis that another dim wants too, and a sum over them is
        the data-parallel one (`plan.batch_reduce`).
      lhs_block, rhs_block: elements that one scale covers, a number a dim. None: one scale or none.
      out_spec: the sharding wanted of the result; None: free dims keep the axes of their operand,
        and other axes are summed; "cheapest": the one that costs the least.
      itemsizes: bytes of an element of lhs, rhs and the result.
    Returns: the plan: `steps` in order, `bytes` that a device receives, `flops` of one device,
      where operands and result lie (`lhs`, `rhs`, `partial`, `out`), what is summed (`reduce`,
      `batch_reduce`).
    Raises: ValueError where a spec has unknown axes, an axis twice, or more entries than its array
      has dims, where contracting dims differ, or `out_spec` is another string.
    Sharding: an axis is dropped from a dim that it does not cut into equal parts: the caller
      gathers there first. While the product runs, a dim with blocks is cut into whole ones or not.
    """
    dims = checked_dims(lhs_shape, rhs_shape, contracting_dims, batch_dims)
    checked_mesh(axis_sizes)
    if len(itemsizes) != 3 or min(itemsizes) <= 0:
        raise ValueError(
            f"plan_gemm: itemsizes is {itemsizes}; expected three positive numbers. They are the "
            "bytes of an element of lhs, rhs and the result."
        )
    wanted: Spec | Literal["cheapest"] | None = None
    if isinstance(out_spec, str):
        if out_spec != "cheapest":
            raise ValueError(
                f'plan_gemm: out_spec is {shown(out_spec)}; expected a spec, "cheapest" or None. '
                "Wrap a single axis: PartitionSpec(axis)."
            )
        wanted = "cheapest"
    elif out_spec is not None:
        wanted = checked_spec("out_spec", out_spec, dims.out_shape, axis_sizes)
    return plan(
        dims,
        checked_spec("lhs_spec", lhs_spec, dims.lhs_shape, axis_sizes),
        checked_spec("rhs_spec", rhs_spec, dims.rhs_shape, axis_sizes),
        tuple(axis_sizes.items()),
        wanted,
        checked_blocks("lhs_block", lhs_block, dims.lhs_shape),
        checked_blocks("rhs_block", rhs_block, dims.rhs_shape),
        itemsizes,
    )


@lru_cache(maxsize=4096)
def plan(
    dims: GemmDims,
    lhs_spec: Spec,
    rhs_spec: Spec,
    axis_sizes: AxisSizes,
    wanted: Spec | Literal["cheapest"] | None = None,
    lhs_block: Dims | None = None,
    rhs_block: Dims | None = None,
    itemsizes: Itemsizes = (2, 2, 2),
    unreduced: Axes = (),
    lhs_also: tuple[Spec, ...] = (),
    rhs_also: tuple[Spec, ...] = (),
    whole: bool = False,
) -> GemmPlan:
    """`plan_gemm` for a product that may have true batch dims; remembers what it planned.

    `unreduced`: axes over which the result is to stay unreduced, all of them or none.
    `whole`: whether arrays move over whole mesh axes only.
    `lhs_also`, `rhs_also`: shardings in which the operand is to be had as well, at no cost; those
    over parts of axes are passed over.
    """
    sizes = dict(axis_sizes)
    lhs_also, rhs_also = (
        tuple(spec for spec in also if {*axes_in(spec)} <= {*sizes})
        for also in (lhs_also, rhs_also)
    )
    # Blocks of a scale must be whole while the product runs, not where the operand comes from.
    lhs = even(dims.lhs_shape, lhs_spec, sizes)
    rhs = even(dims.rhs_shape, rhs_spec, sizes)
    target = None
    if wanted is None:
        target = predictable(dims, lhs, rhs)
    elif wanted != "cheapest":
        target = even(dims.out_shape, wanted, sizes)
    big = tuple(a for a, n in axis_sizes if n > 1)
    if len(big) > MOST_AXES:  # an idle axis could help here too, but is one too many to search
        named = {*axes_in(lhs), *axes_in(rhs), *axes_in(target or ()), *unreduced}
        named |= {a for spec in (*lhs_also, *rhs_also) for a in axes_in(spec)}
        big = tuple(a for a in big if a in named)
    problem = Problem(
        dims,
        big,
        sizes,
        frozenset(only(s, big) for s in (lhs, *lhs_also)),
        frozenset(only(s, big) for s in (rhs, *rhs_also)),
        None if target is None else only(target, big),
        () if {*unreduced} & {*axes_in(target or ())} else unreduced,
        (lhs_block, rhs_block),
        itemsizes,
        whole,
    )
    try:
        choice = search(problem)
    except NoLayoutError:  # none leaves these sums open: they are carried out
        problem = replace(problem, unreduced=())
        choice = search(problem)
    made = _assembled(problem, choice, target or choice.target)
    free = not (problem.unreduced or lhs_block or rhs_block)
    if len(big) > MOST_AXES and problem.target is not None and free:
        # Narrowed, the search does not see all moves: at least the product where it is wanted.
        loops = (*problem.target, *((),) * len(dims.lhs_k))
        there = _assembled(problem, Choice(loops, problem.target), made.out)
        made = min(made, there, key=seconds)
    return made


def seconds(plan: GemmPlan) -> float:
    """Time of a plan on the links and in the products."""
    return plan.bytes / DEFAULT.bandwidth + plan.flops / DEFAULT.peak


def predictable(dims: GemmDims, lhs: Spec, rhs: Spec) -> Spec:
    """The result's sharding where none is wanted: free dims keep the axes of their operand.

    An axis on two dims stays with a true batch dim, else with a batch-like one, else with the
    larger operand.
    """
    left, right = list(lhs), list(rhs)
    _agree_on_batch(dims, left, right)
    _settle_contests(dims, left, right)
    return dims.to_out(left, right)


def _assembled(problem: Problem, choice: Choice, out: Spec) -> GemmPlan:
    dims, sizes, loops = problem.dims, problem.sizes, choice.loops
    kept = len(dims.out_shape)
    lhs, rhs = dims.of_operand(loops, 0), dims.of_operand(loops, 1)
    partial, summed = loops[:kept], loops[kept:]
    like = [i in dims.lhs_batch_like or j in dims.rhs_batch_like for i, j in _pairs(dims)]
    steps = _nearest(dims.lhs_shape, problem.lhs, lhs, problem, 0)
    steps += _nearest(dims.rhs_shape, problem.rhs, rhs, problem, 1)
    result = sum_and_move(
        dims.out_shape,
        partial,
        axes_in(summed),
        choice.target,
        problem.unreduced,
        tuple((a, sizes[a]) for a in problem.axes),
        problem.itemsizes[2],
        "out",
        problem.whole,
    )
    sums = [s for s in result if s.sums]
    finished = sums[-1].after if sums else partial
    return GemmPlan(
        lhs=lhs,
        rhs=rhs,
        partial=partial,
        finished=finished,
        out=out,
        steps=steps + result,
        flops=operations(dims) / shards(axes_in(loops), sizes),
        reduce=axes_in(d for d, batch in zip(summed, like, strict=True) if not batch),
        batch_reduce=axes_in(d for d, batch in zip(summed, like, strict=True) if batch),
        unreduced=problem.unreduced,
        bias=finished[kept - len(dims.rhs_free) :],
        lhs_scale=lhs if problem.blocks[0] else None,
        rhs_scale=rhs if problem.blocks[1] else None,
    )


def _nearest(
    shape: Dims, sources: frozenset[Spec], want: Spec, problem: Problem, side: int
) -> tuple[Step, ...]:
    """The cheapest steps from any of some shardings."""
    sizes = tuple((a, problem.sizes[a]) for a in problem.axes)
    itemsize, name = problem.itemsizes[side], ("lhs", "rhs")[side]
    ways = [
        move(shape, have, want, sizes, itemsize, name, problem.whole) for have in sorted(sources)
    ]
    return min(ways, key=lambda steps: (sum(s.bytes for s in steps), len(steps)))


def _pairs(dims: GemmDims) -> Iterable[tuple[int, int]]:
    return zip(dims.lhs_k, dims.rhs_k, strict=True)


def _agree_on_batch(dims: GemmDims, lhs: list[Axes], rhs: list[Axes]) -> None:
    """True batch dims: the longer of two shardings that go together; else the larger operand's."""
    taken: set[str] = set()
    for i, j in zip(dims.lhs_batch, dims.rhs_batch, strict=True):
        a, b = cut_before(lhs[i], taken), cut_before(rhs[j], taken)
        if a == b[: len(a)] or b == a[: len(b)]:
            keep = max(a, b, key=len)
        else:
            keep = a if prod(dims.lhs_shape) >= prod(dims.rhs_shape) else b
        lhs[i] = rhs[j] = keep
        taken.update(keep)


def _settle_contests(dims: GemmDims, lhs: list[Axes], rhs: list[Axes]) -> None:
    """A mesh axis can shard one dim of the result; the others lose it and what follows it."""
    shared = {axis for i in dims.lhs_batch for axis in lhs[i]}
    for side, free in ((lhs, dims.lhs_free), (rhs, dims.rhs_free)):
        for d in free:
            side[d] = cut_before(side[d], shared)
    lhs_is_larger = prod(dims.lhs_shape) >= prod(dims.rhs_shape)
    for i in dims.lhs_free:
        for axis in lhs[i]:
            j = next((j for j in dims.rhs_free if axis in rhs[j]), None)
            if j is None:
                continue
            like_lhs, like_rhs = i in dims.lhs_batch_like, j in dims.rhs_batch_like
            if like_lhs if like_lhs != like_rhs else lhs_is_larger:
                rhs[j] = cut_before(rhs[j], (axis,))
            else:
                lhs[i] = cut_before(lhs[i], (axis,))
                break  # what followed `axis` on this dim is lost too
