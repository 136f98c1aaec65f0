"""Ways to prepare the operands of a product before it is planned, and what a plan costs."""

from collections.abc import Iterator
from itertools import product
from math import prod

from shardops.rules.cost import moved_bytes, reduced_bytes
from shardops.rules.gemm_dims import Dims, GemmDims, GemmPlan
from shardops.rules.spec import Axes, Sizes, Spec, axes_in, common_prefix, fit, local_shape

# Operations in the time that one byte takes between devices: 800 TFLOP/s of bfloat16 products over
# 450 GB/s a direction of NVLink. Elements count as two bytes.
_OPERATIONS_A_BYTE = 1800
_ITEMSIZE = 2


def preparations(
    dims: GemmDims,
    lhs: list[Axes],
    rhs: list[Axes],
    sizes: Sizes,
    wanted: Spec | None,
    lhs_block: Dims | None,
    rhs_block: Dims | None,
) -> Iterator[tuple[list[Axes], list[Axes]]]:
    """Operands as they are offered, then:

    - sliced along contracting dims where the other operand is sharded: no bytes, but a sum;
    - gathered first along dims that the result is not wanted sharded over: an operand may be
      smaller than the result.
    """
    gathered = (False,) if wanted is None else (False, True)
    for slice_by, gather_lhs, gather_rhs in product((None, "lhs", "rhs"), gathered, gathered):
        left, right = list(lhs), list(rhs)
        if gather_lhs and wanted is not None:
            _gather(left, dims.lhs_free, wanted[len(dims.lhs_batch) :])
        if gather_rhs and wanted is not None:
            _gather(right, dims.rhs_free, wanted[len(dims.lhs_batch + dims.lhs_free) :])
        if slice_by == "lhs":
            _slice(right, dims.rhs_k, dims.rhs_shape, left, dims.lhs_k, sizes, rhs_block)
        elif slice_by == "rhs":
            _slice(left, dims.lhs_k, dims.lhs_shape, right, dims.rhs_k, sizes, lhs_block)
        yield left, right


def _gather(operand: list[Axes], free: Dims, wanted: Spec) -> None:
    for d, want in zip(free, wanted, strict=False):
        operand[d] = common_prefix(operand[d], want)


def _slice(
    operand: list[Axes],
    dims: Dims,
    shape: Dims,
    other: list[Axes],
    other_dims: Dims,
    sizes: Sizes,
    block: Dims | None,
) -> None:
    for d, e in zip(dims, other_dims, strict=True):
        have, want = operand[d], other[e]
        if have != want[: len(have)] or {*want[len(have) :]} & {*axes_in(operand)}:
            continue
        operand[d] = fit(want, shape[d], sizes, block[d] if block else 1)


def gemm_cost(
    dims: GemmDims, offered: tuple[Spec, Spec], plan: GemmPlan, sizes: Sizes, wanted: Spec | None
) -> float:
    """Bytes a device receives, and its operations in bytes that would take as long."""
    moved = moved_bytes(dims.lhs_shape, offered[0], plan.lhs, sizes, _ITEMSIZE)
    moved += moved_bytes(dims.rhs_shape, offered[1], plan.rhs, sizes, _ITEMSIZE)
    moved += reduced_bytes(dims.out_shape, plan.partial, plan.reduction, sizes, _ITEMSIZE)
    if wanted is not None:
        moved += moved_bytes(dims.out_shape, plan.out, wanted, sizes, _ITEMSIZE)
    local = local_shape(dims.lhs_shape, plan.lhs, sizes)
    operations = 2 * prod(local_shape(dims.out_shape, plan.partial, sizes))
    return moved + operations * prod(local[i] for i in dims.lhs_k) / _OPERATIONS_A_BYTE
