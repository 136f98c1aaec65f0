"""One device's share of a product of quantised operands: jnp, or a kernel by the GPU's plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels.gemm_scaled_plan import DimPair, Kind, ScaledPlan, Side, scaled_plan
from shardops.primitives.gemm_local import gemm_reference
from shardops.primitives.local import local_primitive
from shardops.primitives.scaled import ScaledArray, ScalingMode

Block = tuple[int, ...] | None
Results = tuple[jax.Array, ...]

_KINDS: dict[ScalingMode, Kind] = {
    ScalingMode.NONE: "none",
    ScalingMode.TENSOR_DELAYED: "tensor",
    ScalingMode.TENSOR_CURRENT: "tensor",
    ScalingMode.BLOCK_128: "block_128",
    ScalingMode.MXFP8: "mxfp8",
}


@dataclass(frozen=True)
class Scaled:
    """What is static of a quantised operand."""

    mode: ScalingMode
    dtype: np.dtype[Any]
    block: Block

    @classmethod
    def of(cls, operand: Any) -> "Scaled | None":
        """None for an operand that is not quantised."""
        if not isinstance(operand, ScaledArray) or operand.mode is ScalingMode.NONE:
            return None
        return cls(operand.mode, operand.dtype, operand.block)


def dequantized(side: Scaled | None, arrays: Sequence[jax.Array], dtype: Any = jnp.float32) -> Any:
    """Products of 8-bit numbers and float32 scales, rounded to float32 once, then to `dtype`."""
    if side is None:
        return arrays[0].astype(dtype)
    data, scales = arrays
    scaled = ScaledArray(data, scales, None, side.mode, side.dtype, side.block)
    return scaled.dequantize(dtype)


def local_plan(
    sides: tuple[Scaled | None, Scaled | None],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    contracting: DimPair,
    batch: DimPair,
    arch: str,
) -> ScaledPlan:
    """How the product runs on a GPU; `shapes` and `dtypes` of the data on one device."""
    lhs, rhs = (
        Side(shape, dtype, "none" if s is None else _KINDS[s.mode], None if s is None else s.block)
        for s, shape, dtype in zip(sides, shapes, dtypes, strict=True)
    )
    return scaled_plan(lhs, rhs, contracting, batch, arch)


def _sides(
    arrays: Sequence[jax.Array], lhs: Scaled | None, rhs: Scaled | None
) -> tuple[Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]]:
    """Data and scales of lhs, of rhs, and the other operands."""
    n = 1 + (lhs is not None)
    m = n + 1 + (rhs is not None)
    return arrays[:n], arrays[n:m], arrays[m:]


def _reference(
    *arrays: jax.Array, lhs: Scaled | None, rhs: Scaled | None, precise: bool, **statics: Any
) -> Results:
    """Dequantised to float32, then multiplied in it."""
    del precise
    a, b, rest = _sides(arrays, lhs, rhs)
    return gemm_reference(dequantized(lhs, a), dequantized(rhs, b), *rest, **statics)


def scaled_gemm_kernel(
    *arrays: jax.Array,
    lhs: Scaled | None,
    rhs: Scaled | None,
    contracting: DimPair,
    batch: DimPair,
    bias: bool,
    add: bool,
    epilogue: Any,
    out_dtype: str,
    precision: Any,
    precise: bool,
) -> Results:
    # CUDA only: not imported on other machines.
    from shardops.kernels import gemm as kernels
    from shardops.kernels.gemm_scaled import native_gemm
    from shardops.kernels.target import current_target

    a, b, rest = _sides(arrays, lhs, rhs)
    extra = iter(rest)
    bias_array = next(extra) if bias else None
    add_array = next(extra) if add else None
    dims = {"contracting": contracting, "batch": batch, "precision": precision}
    after = {"epilogue": epilogue, "out_dtype": out_dtype}
    plan = local_plan(
        (lhs, rhs),
        [a[0].shape, b[0].shape],
        [a[0].dtype.name, b[0].dtype.name],
        contracting,
        batch,
        current_target().arch,
    )
    if plan.native is not None:
        found = native_gemm(
            plan.native, (a[0], a[1]), (b[0], b[1]), bias_array, add_array, **after, precise=precise
        )
        if found is not None:
            return found
    if not plan.exact:
        wide = dequantized(lhs, a), dequantized(rhs, b)
        return kernels.gemm(*wide, bias_array, add_array, **dims, **after)
    x, w = in_bfloat16(lhs, a), in_bfloat16(rhs, b)
    factors = [x[1] for side, x in ((lhs, a), (rhs, b)) if side is not None and side.block is None]
    if not factors:
        return kernels.gemm(x, w, bias_array, add_array, **dims, **after)
    (z,) = kernels.gemm(x, w, None, None, **dims, epilogue="none", out_dtype=jnp.float32)
    for factor in factors:
        z = z * factor
    return kernels.finish(z, bias_array, add_array, epilogue, jnp.dtype(out_dtype))


def in_bfloat16(side: Scaled | None, arrays: Sequence[jax.Array]) -> jax.Array:
    """The values, or without the scale of a tensor, which is applied to the result."""
    if side is None or side.block is None:
        return arrays[0].astype(jnp.bfloat16)
    return dequantized(side, arrays, jnp.bfloat16)


local_scaled_gemm = local_primitive("shardops_gemm_scaled", _reference, scaled_gemm_kernel)
