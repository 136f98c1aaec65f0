"""dot_general: a drop-in for jax.lax.dot_general, true batch dims included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardops import array_type, config
from shardops.errors import shown
from shardops.primitives import check
from shardops.primitives.gemm import OutSharding, product
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import Operand, unwrapped


def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: OutSharding = None,
) -> jax.Array:
    """Multiply two arrays over contracting dims, one product for each element of the batch dims.

        out[*b, *l, *r] = sum_k lhs[*b, *l, *k] rhs[*b, *k, *r]

    The dims of each operand may stand in any order. A drop-in for `jax.lax.dot_general`: pass it as
    Flax's `dot_general=`. Accumulates in float32. What no kernel is made for (integers, float64,
    complex, two dtypes, Python scalars, an algorithm as `precision`) goes to
    `jax.lax.dot_general`. Derivatives of any order in reverse mode; no forward mode (`jax.jvp`,
    `jacfwd`): of `hessian` take `jacrev(jacrev(f))`.

    Args:
      lhs, rhs: float32 | bfloat16 | float16; others as above. Or ScaledArrays, as in
        `shardops.gemm`.
      dimension_numbers: ((contracting of lhs, of rhs), (batch of lhs, of rhs)).
      precision: as in jax.lax.dot_general; float32 operands use TF32 only where it, or
        `jax.default_matmul_precision`, asks for it.
      preferred_element_type: dtype of the result; None: the operands'.
      out_sharding: PartitionSpec of the result, "cheapest" or None, as in `shardops.gemm`.
    Returns: [*b, *l, *r].
    Raises: TypeError for dtypes; ValueError for dims and shardings.
    Sharding: batch dims: any axes, no communication; else as `shardops.gemm`.
    Source: https://www.tensorflow.org/xla/operation_semantics#dotgeneral
    """
    if not _has_kernel(lhs, rhs, precision, preferred_element_type):
        return _lax(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    lhs, rhs = check.operands("dot_general", unwrapped(lhs), unwrapped(rhs))
    try:
        contracting, batch = dimension_numbers
    except (TypeError, ValueError):
        raise TypeError(
            f"dot_general: dimension_numbers is {shown(dimension_numbers)}; expected ((contracting "
            "of lhs, of rhs), (batch of lhs, of rhs)). Pass two pairs."
        ) from None
    contracting = check.paired_dims("dot_general", "contracting dims", contracting, lhs, rhs)
    batch = check.paired_dims("dot_general", "batch dims", batch, lhs, rhs)
    for side, name in enumerate(("lhs", "rhs")):
        both = {*contracting[side]} & {*batch[side]}
        if both:
            raise ValueError(
                f"dot_general: dimension_numbers name dims {sorted(both)} of {name} as contracting "
                "and as batch; expected one role a dim. Drop one of the two."
            )
    op = GemmOp(
        name="dot_general",
        contracting=contracting,
        batch=batch,
        out_dtype=check.float_dtype(
            "dot_general",
            "preferred_element_type",
            preferred_element_type,
            jnp.result_type(lhs.dtype, rhs.dtype),
        ),
        precision=_canonical(precision),
        cheapest=isinstance(out_sharding, str) and out_sharding == "cheapest",
        kernel=config.runs_as_kernel("dot_general"),
    )
    return product(op, lhs, rhs, None, None, out_sharding)


def _has_kernel(lhs: Any, rhs: Any, precision: Any, preferred: Any) -> bool:
    """Whether operands, dtypes and precision are ones that `gemm` knows."""
    for operand in (lhs, rhs):
        if hasattr(operand, "scale_inv") or operand is None or isinstance(operand, str):
            return True  # or refused with its reason
        if not isinstance(operand, jax.Array | np.ndarray | np.generic):
            return False
    if preferred is not None and _dtype(preferred).name not in check.FLOATS:
        return False
    if isinstance(precision, str) and precision in jax.lax.DotAlgorithmPreset.__members__:
        return False
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return False
    return lhs.dtype == rhs.dtype and jnp.dtype(lhs.dtype).name in check.FLOATS


def _dtype(preferred: Any) -> Any:
    try:
        return jnp.dtype(preferred)
    except Exception as error:  # NumPy's message has the repr of the value, which may fail
        raise TypeError(
            f"dot_general: preferred_element_type is {shown(preferred)}; expected a dtype. Pass "
            "one such as jnp.float32."
        ) from error


def _lax(
    lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any, preferred: Any, out_sharding: Any
) -> jax.Array:
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    mesh = array_type.mesh_of(lhs, rhs)
    explicit = bool(mesh.explicit_axes) and out_sharding != "cheapest"
    out = jax.lax.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision=precision,
        preferred_element_type=preferred,
        out_sharding=out_sharding if explicit else None,
    )
    wanted = None if explicit else check.out_sharding("dot_general", out_sharding, out.shape, mesh)
    return (
        out if wanted is None else array_type.constrain(out, wanted, check.open_dims(out_sharding))
    )


def _canonical(precision: Any) -> jax.lax.Precision | None:
    """One Precision: of a pair (lhs, rhs) the more precise."""
    if precision is None:
        return None
    pair = precision if isinstance(precision, tuple) else (precision,)
    try:
        given = [jax.lax.Precision(p) for p in pair if p is not None]
        if len(pair) > 2:
            raise ValueError("one a side")
    except ValueError as error:
        raise ValueError(
            f"dot_general: precision is {shown(precision)}; expected None, a jax.lax.Precision, "
            "one of its names, or a pair of these. Use 'highest' for full float32."
        ) from error
    return max(given, key=lambda p: p.value, default=None)
