"""Products of 8-bit operands with their scales on the GPU, through cuBLASLt."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import scale_tiles
from shardops.kernels.gemm import CUDA_TYPES, Epilogue, custom_call, finish
from shardops.kernels.gemm_scaled_plan import Matrix, Native, ScaleMode
from shardops.kernels.sizes import round_up

Dims = tuple[int, ...]
Pair = tuple[jax.Array, jax.Array]


def native_gemm(
    plan: Native,
    lhs: Pair,
    rhs: Pair,
    bias: jax.Array | None,
    add: jax.Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: Any,
    precise: bool,
) -> tuple[jax.Array, ...] | None:
    """As `kernels.gemm.gemm`, of values data * scale, in the tensor cores' 8-bit arithmetic.

    Args:
      lhs, rhs: data and scales, in the shapes that the plan was made for.
      precise: add up in float32 rather than in the shorter format of the tensor cores. Sums over
        blocks of 128 are always brought into float32.
    Returns: results as of `kernels.gemm.gemm`; None where cuBLASLt has no algorithm.
    """
    out_dtype = jnp.dtype(out_dtype)
    product = _Product(plan, lhs, rhs, precise)
    if _fuses(plan, bias, add, epilogue, out_dtype):
        fused = product.call(bias, add, epilogue, out_dtype)
        if fused is not None:
            return fused
    bare = product.call(None, None, "none", jnp.dtype(jnp.float32))
    return None if bare is None else finish(bare[0], bias, add, epilogue, out_dtype)


def _fuses(
    plan: Native,
    bias: jax.Array | None,
    add: jax.Array | None,
    epilogue: Epilogue,
    out_dtype: np.dtype,
) -> bool:
    """Whether the library has the epilogue, and does it to the result's precision."""
    if plan.padded and (bias is not None or add is not None):
        return False  # they would have to be padded too
    if bias is not None and bias.dtype != _bias_dtype(out_dtype):
        return False
    if add is not None and add.dtype != out_dtype:
        return False
    # Its tanh is good to 11 bits.
    return epilogue not in ("gelu", "gelu_aux") or out_dtype != jnp.float32


def _bias_dtype(out_dtype: np.dtype) -> np.dtype:
    """What cuBLASLt takes with 8-bit operands."""
    return jnp.dtype(jnp.bfloat16) if out_dtype == jnp.float32 else out_dtype


@dataclass(frozen=True)
class _Product:
    plan: Native
    lhs: Pair
    rhs: Pair
    precise: bool

    def call(
        self,
        bias: jax.Array | None,
        add: jax.Array | None,
        epilogue: Epilogue,
        out_dtype: np.dtype,
    ) -> tuple[jax.Array, ...] | None:
        """The custom call's results; None where cuBLASLt has no algorithm for it."""
        plan = self.plan
        operands, layouts = self._operands
        shape = (plan.lhs.batch, plan.m, plan.n) if plan.padded else plan.result
        found = custom_call(
            self._attributes(out_dtype),
            operands,
            bias,
            add,
            epilogue,
            jax.ShapeDtypeStruct(shape, out_dtype),
            layouts=layouts,
        )
        if found is None or not plan.padded:
            return found
        cut = (slice(None), slice(plan.lhs.rows), slice(plan.rhs.rows))
        return tuple(r[cut].reshape(plan.result) for r in found)

    @cached_property
    def _operands(self) -> tuple[list[jax.Array], list[Dims | None]]:
        """As csrc/gemm_problem.h wants them, and their layouts; None: in row-major order.

        A layout leaves it to XLA to have scales written so by what computes them.
        """
        plan = self.plan
        data = [
            _matrix(plan.lhs, self.lhs[0], plan.m, plan.k),
            _matrix(plan.rhs, self.rhs[0], plan.n, plan.k),
        ]
        if plan.lhs.scale is ScaleMode.VEC_32:
            tiles = scale_tiles.tiled((plan.lhs, self.lhs[1]), (plan.rhs, self.rhs[1]))
            return [*data, *tiles], [None] * 4
        scales = [
            _scales(plan.lhs, self.lhs[1], plan.m),
            _scales(plan.rhs, self.rhs[1], plan.n),
        ]
        return [*data, *(s for s, _ in scales)], [None, None, *(order for _, order in scales)]

    def _attributes(self, out_dtype: np.dtype) -> dict[str, int]:
        plan = self.plan
        return {
            "m": plan.m,
            "n": plan.n,
            "k": plan.k,
            "batch": plan.lhs.batch,
            "transb": 1,
            "type": CUDA_TYPES[self.lhs[0].dtype.name],
            "type_b": CUDA_TYPES[self.rhs[0].dtype.name],
            "out_type": CUDA_TYPES[out_dtype.name],
            "bias_type": CUDA_TYPES[_bias_dtype(out_dtype).name],
            "scale_a": int(plan.lhs.scale),
            "scale_b": int(plan.rhs.scale),
            "fast_accum": int(plan.lhs.scale is ScaleMode.TENSOR and not self.precise),
        }


def _matrix(matrix: Matrix, data: jax.Array, rows: int, k: int) -> jax.Array:
    """[batch, rows, k], contiguous along k, padded with zeros."""
    array = jnp.transpose(data, matrix.order).reshape(matrix.batch, matrix.rows, matrix.k)
    return _padded(array, (matrix.batch, rows, k))


def _scales(matrix: Matrix, scales: jax.Array, rows: int) -> tuple[jax.Array, Dims | None]:
    """Those of a tensor or of blocks of 128, and their layout."""
    if matrix.scale is ScaleMode.TENSOR:
        return scales, None
    blocks = -(-matrix.k // 128)
    array = jnp.transpose(scales, matrix.order).reshape(-1, blocks)
    if matrix.scale is ScaleMode.VEC_128:
        return _padded(array, (rows, blocks)), (1, 0)
    return _padded(array, (array.shape[0], round_up(blocks, 4))), None


def _padded(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    missing = [(0, want - have) for want, have in zip(shape, array.shape, strict=True)]
    if not any(after for _, after in missing):
        return array
    return jax.lax.pad(array, np.zeros((), array.dtype), [(*pair, 0) for pair in missing])
