"""The sharding rule of a matrix product: where operands lie, and what is summed over the mesh.

Pure: shapes, specs and axis sizes in, a `GemmPlan` out. No arrays and no devices.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Literal

from shardops.rules.gemm_dims import Dims, GemmDims, GemmPlan
from shardops.rules.prepare import gemm_cost, preparations
from shardops.rules.reduction import place_reduction, scattered
from shardops.rules.spec import (
    Axes,
    Sizes,
    Spec,
    axes_in,
    common_prefix,
    cut_before,
    fit,
    shards,
    to_spec,
)


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
) -> GemmPlan:
    """Plan the product of sharded operands.

        out[lhs free, rhs free] = sum_k lhs[.., k, ..] rhs[.., k, ..]

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
      out_spec: the sharding wanted of the result; None: as the operands give it; "cheapest": the
        one that moves the least.
    Returns: where operands and result lie and what is summed: `lhs`, `rhs`, `out`, `reduction`, …
    Raises: ValueError where a spec is longer than its shape, or `out_spec` is another string.
    Sharding: axes on contracting dims of both operands are summed; for axes on one operand's only,
      it is gathered or the other one sliced and the result summed, whichever costs less; axes on
      dims that they do not divide are gathered.
    """
    lhs, rhs = tuple(lhs_shape), tuple(rhs_shape)
    dims = GemmDims(
        lhs,
        rhs,
        tuple(d % len(lhs) for d in contracting_dims[0]),
        tuple(d % len(rhs) for d in contracting_dims[1]),
        lhs_batch_like=tuple(d % len(lhs) for d in batch_dims[0]),
        rhs_batch_like=tuple(d % len(rhs) for d in batch_dims[1]),
    )
    wanted: Spec | Literal["cheapest"] | None = None
    if isinstance(out_spec, str):
        if out_spec != "cheapest":
            raise ValueError(
                f'plan_gemm: out_spec is {out_spec!r}; expected a spec, "cheapest" or None. Wrap '
                "a single axis: PartitionSpec(axis)."
            )
        wanted = "cheapest"
    elif out_spec is not None:
        wanted = to_spec(out_spec, len(dims.out_shape))
    return plan(
        dims,
        to_spec(lhs_spec, len(lhs)),
        to_spec(rhs_spec, len(rhs)),
        tuple(axis_sizes.items()),
        wanted,
        None if lhs_block is None else tuple(lhs_block),
        None if rhs_block is None else tuple(rhs_block),
    )


@lru_cache(maxsize=4096)
def plan(
    dims: GemmDims,
    lhs_spec: Spec,
    rhs_spec: Spec,
    axis_sizes: tuple[tuple[str, int], ...],
    wanted: Spec | Literal["cheapest"] | None = None,
    lhs_block: Dims | None = None,
    rhs_block: Dims | None = None,
) -> GemmPlan:
    """`plan_gemm` for a product that may have true batch dims; remembers what it planned.

    Of the ways to prepare the operands the one whose plan costs least, the first of equals.
    """
    sizes = dict(axis_sizes)
    asked = wanted if isinstance(wanted, tuple) else None
    lhs = _divisible(dims.lhs_shape, lhs_spec, sizes, lhs_block)
    rhs = _divisible(dims.rhs_shape, rhs_spec, sizes, rhs_block)
    plans = [
        _plan_prepared(dims, *prepared, sizes, wanted, lhs_block, rhs_block)
        for prepared in preparations(dims, lhs, rhs, sizes, asked, lhs_block, rhs_block)
    ]
    offered = (tuple(lhs), tuple(rhs))
    return min(plans, key=lambda p: gemm_cost(dims, offered, p, sizes, asked))


def _plan_prepared(
    dims: GemmDims,
    lhs: list[Axes],
    rhs: list[Axes],
    sizes: Sizes,
    wanted: Spec | Literal["cheapest"] | None,
    lhs_block: Dims | None,
    rhs_block: Dims | None,
) -> GemmPlan:
    asked = wanted if isinstance(wanted, tuple) else None
    _agree_on_contracting(dims, lhs, rhs)
    _agree_on_batch(dims, lhs, rhs, asked)
    _settle_contests(dims, lhs, rhs, asked)
    _slice_idle_dims(dims, lhs, rhs, sizes, asked, lhs_block, rhs_block)

    partial = dims.to_out(lhs, rhs)
    like = [i in dims.lhs_batch_like or j in dims.rhs_batch_like for i, j in _pairs(dims)]
    summed = [lhs[i] for i in dims.lhs_k]
    axes = axes_in(summed)
    if wanted == "cheapest":
        asked = scattered(axes, partial, dims.out_shape, sizes)
    reduction, out = place_reduction(axes, partial, dims.out_shape, sizes, asked)
    return GemmPlan(
        lhs=tuple(lhs),
        rhs=tuple(rhs),
        partial=partial,
        out=out,
        reduction=reduction,
        reduce=axes_in(d for d, batch in zip(summed, like, strict=True) if not batch),
        batch_reduce=axes_in(d for d, batch in zip(summed, like, strict=True) if batch),
        bias=out[len(out) - len(dims.rhs_free) :],
        lhs_scale=tuple(lhs) if lhs_block else None,
        rhs_scale=tuple(rhs) if rhs_block else None,
    )


def _pairs(dims: GemmDims) -> Iterable[tuple[int, int]]:
    return zip(dims.lhs_k, dims.rhs_k, strict=True)


def _divisible(shape: Dims, spec: Spec, sizes: Sizes, block: Dims | None) -> list[Axes]:
    units = block or (1,) * len(shape)
    return [fit(d, n, sizes, u) for d, n, u in zip(spec, shape, units, strict=True)]


def _agree_on_contracting(dims: GemmDims, lhs: list[Axes], rhs: list[Axes]) -> None:
    """Keep what both operands shard alike; an axis on one side only is gathered."""
    for i, j in _pairs(dims):
        lhs[i] = rhs[j] = common_prefix(lhs[i], rhs[j])


def _agree_on_batch(dims: GemmDims, lhs: list[Axes], rhs: list[Axes], wanted: Spec | None) -> None:
    """True batch dims: an unsharded side is sliced; of two shardings one is kept, by choice."""
    taken: set[str] = set()
    for p, (i, j) in enumerate(zip(dims.lhs_batch, dims.rhs_batch, strict=True)):
        a, b = cut_before(lhs[i], taken), cut_before(rhs[j], taken)
        if a == b[: len(a)] or b == a[: len(b)]:
            keep = max(a, b, key=len)
        elif wanted is not None and wanted[p] in (a, b):
            keep = wanted[p]
        else:
            keep = a if prod(dims.lhs_shape) >= prod(dims.rhs_shape) else b
        lhs[i] = rhs[j] = keep
        taken.update(keep)


def _settle_contests(dims: GemmDims, lhs: list[Axes], rhs: list[Axes], wanted: Spec | None) -> None:
    """A mesh axis can shard one dim of the result: the other operand is gathered along it.

    Who keeps it: a true batch dim; then the dim where the wanted result has it; then a batch-like
    dim; then the larger operand.
    """
    shared = {axis for i in dims.lhs_batch for axis in lhs[i]}
    for side, free in ((lhs, dims.lhs_free), (rhs, dims.rhs_free)):
        for d in free:
            side[d] = cut_before(side[d], shared)
    place = {("lhs", i): p + len(dims.lhs_batch) for p, i in enumerate(dims.lhs_free)}
    first_rhs = len(dims.lhs_batch) + len(dims.lhs_free)
    place |= {("rhs", j): p + first_rhs for p, j in enumerate(dims.rhs_free)}
    lhs_is_larger = prod(dims.lhs_shape) >= prod(dims.rhs_shape)
    for i in dims.lhs_free:
        for axis in lhs[i]:
            j = next((j for j in dims.rhs_free if axis in rhs[j]), None)
            if j is None:
                continue
            want_lhs = wanted is not None and axis in wanted[place["lhs", i]]
            want_rhs = wanted is not None and axis in wanted[place["rhs", j]]
            like_lhs, like_rhs = i in dims.lhs_batch_like, j in dims.rhs_batch_like
            if want_lhs != want_rhs:
                keep_lhs = want_lhs
            elif like_lhs != like_rhs:
                keep_lhs = like_lhs
            else:
                keep_lhs = lhs_is_larger
            if keep_lhs:
                rhs[j] = cut_before(rhs[j], (axis,))
            else:
                lhs[i] = cut_before(lhs[i], (axis,))
                break  # what followed `axis` on this dim is gathered too


def _slice_idle_dims(
    dims: GemmDims,
    lhs: list[Axes],
    rhs: list[Axes],
    sizes: Sizes,
    wanted: Spec | None,
    lhs_block: Dims | None,
    rhs_block: Dims | None,
) -> None:
    """Slice operands along idle axes that the result is wanted over: no bytes, fewer FLOPs."""
    if wanted is None:
        return
    sides = [(lhs, i, dims.lhs_shape, lhs_block) for i in dims.lhs_batch]
    sides += [(lhs, i, dims.lhs_shape, lhs_block) for i in dims.lhs_free]
    sides += [(rhs, j, dims.rhs_shape, rhs_block) for j in dims.rhs_free]
    for (side, d, shape, block), want in zip(sides, wanted, strict=True):
        have = side[d]
        if want[: len(have)] != have:
            continue
        busy = {*axes_in(lhs), *axes_in(rhs)}
        tail = []
        for axis in want[len(have) :]:
            if axis in busy:
                break
            tail.append(axis)
        unit = block[d] if block else 1
        side[d] = have + fit(tuple(tail), shape[d] // shards(have, sizes), sizes, unit)
    for i, j in zip(dims.lhs_batch, dims.rhs_batch, strict=True):
        rhs[j] = lhs[i]
