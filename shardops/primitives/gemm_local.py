"""The product on one device: the jnp reference, which says what it means, and the kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from shardops.primitives.local import local_primitive

DimPair = tuple[tuple[int, ...], tuple[int, ...]]


def gemm_reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *extra: jax.Array,
    contracting: DimPair,
    batch: DimPair,
    bias: bool,
    add: bool,
    epilogue: str,
    out_dtype: str,
    precision: Any,
) -> tuple[jax.Array, ...]:
    """The product on one device, in jnp: what the kernel computes, and what a CPU runs."""
    rest = iter(extra)
    z = jax.lax.dot_general(
        lhs, rhs, (contracting, batch), precision=precision, preferred_element_type=jnp.float32
    )
    bias_array = next(rest) if bias else None
    if add:
        z = z + next(rest).astype(jnp.float32)
    if bias_array is not None:
        z = z + bias_array.astype(jnp.float32)
    pre = z.astype(out_dtype)
    if epilogue in ("none", "bias"):
        return (pre,)
    activate = jax.nn.relu if epilogue == "relu" else jax.nn.gelu
    out = activate(z).astype(out_dtype)
    return (out, pre) if epilogue == "gelu_aux" else (out,)


def _gemm_kernel(
    lhs: jax.Array, rhs: jax.Array, *extra: jax.Array, bias: bool, add: bool, **statics: Any
) -> tuple[jax.Array, ...]:
    from shardops.kernels import gemm as kernels  # CUDA only: not imported on other machines

    rest = iter(extra)
    bias_array = next(rest) if bias else None
    add_array = next(rest) if add else None
    return tuple(kernels.gemm(lhs, rhs, bias_array, add_array, **statics))


def _gemm_on_cpu(lhs: jax.Array, rhs: jax.Array, *extra: Any, **statics: Any) -> Any:
    """XLA:CPU multiplies 16-bit operands into float32 in some orders of dims only; widened, the
    values are the same."""
    wide = jnp.float32
    return gemm_reference(lhs.astype(wide), rhs.astype(wide), *extra, **statics)


local_gemm = local_primitive("shardops_gemm", gemm_reference, _gemm_kernel, on_cpu=_gemm_on_cpu)
