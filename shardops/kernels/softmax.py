"""Softmax on the GPU, on one device's rows: called while JAX lowers."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import launch
from shardops.kernels.softmax_plan import (
    MAX_KEYS,
    MAX_MASK_DIGITS,
    Geometry,
    MaskKind,
    Plan,
    SoftmaxProblem,
    backward_plan,
    forward_plan,
    mask_rows,
)
from shardops.kernels.target import current_target

__all__ = [
    "MAX_KEYS",
    "MAX_SCALE",
    "backward_params",
    "forward_params",
    "softmax_backward",
    "softmax_forward",
]

# What the forward kernels multiply halves of logits by is `_DOUBLED` times the scale, in float32.
_DOUBLED = 2 * math.log2(math.e)
MAX_SCALE = float(np.finfo(np.float32).max) / _DOUBLED

# `Divisor` and `Params` of csrc/kernels/softmax_row.cuh.
_DIVISOR = np.dtype([("value", np.int64), ("factor", np.uint32), ("shift", np.uint32)])
_PARAMS = np.dtype(
    [
        ("rows", np.int64),
        ("queries", _DIVISOR),
        ("diagonal", np.int64),
        ("mask_below", _DIVISOR, MAX_MASK_DIGITS),
        ("mask_size", _DIVISOR, MAX_MASK_DIGITS),
        ("scale", np.float32),
        ("zero", np.uint32),
    ],
    align=True,
)


def softmax_forward(
    x: jax.Array,
    mask: jax.Array | None,
    first: jax.Array | None,
    *,
    scale: float,
    diagonal: int | None,
    geometry: Geometry | None = None,
) -> jax.Array:
    """Turns the scaled logits of each row into weights that sum to 1 over the keys it sees.

    Args:
      x: [*batch, q, k] float32 | bfloat16 | float16; at least one element.
      mask: None, or bool of the rank of x, each dim 1 or that of x: True hides a key.
      first: None, or an int32 scalar: which query row 0 of x is.
      scale: of a magnitude up to MAX_SCALE.
      diagonal: query i sees keys up to i + first + diagonal; None: all.
      geometry: overrides the one that the plan chooses, for tuning.
    Returns: as x. A row that sees no key is 0.
    """
    digits, kind = (), 0
    if mask is not None:
        mask, digits, kind = _fitted(mask, x.shape)
    problem = SoftmaxProblem(
        rows=math.prod(x.shape[:-1]),
        keys=x.shape[-1],
        x=x.dtype.name,
        mask=kind,
        digits=len(digits),
        causal=diagonal is not None,
        first=first is not None,
        sign=(scale > 0) - (scale < 0),
    )
    params = forward_params(x.shape, scale, diagonal, digits)
    operands = [operand for operand in (x, mask, first) if operand is not None]
    return _run(forward_plan(problem, current_target(), geometry), operands, x, params)


def softmax_backward(
    dy: jax.Array,
    y: jax.Array,
    first: jax.Array | None,
    *,
    scale: float,
    diagonal: int | None,
    geometry: Geometry | None = None,
) -> jax.Array:
    """Pulls a cotangent of y back.

        dx = scale · y · (dy - sum_k(y · dy)), over the keys that a query sees; 0 at the others

    Args:
      dy, y: [*batch, q, k], of one type; at least one element.
      first, diagonal, geometry: as of the forward. Later keys are not read.
    Returns: dx as y.
    """
    problem = SoftmaxProblem(
        rows=math.prod(y.shape[:-1]),
        keys=y.shape[-1],
        x=y.dtype.name,
        causal=diagonal is not None,
        first=first is not None,
    )
    params = backward_params(y.shape, scale, diagonal)
    operands = [operand for operand in (dy, y, first) if operand is not None]
    return _run(backward_plan(problem, current_target(), geometry), operands, y, params)


def forward_params(
    shape: tuple[int, ...],
    scale: float,
    diagonal: int | None,
    digits: tuple[tuple[int, int], ...] = (),
) -> np.void:
    """The scalars of the forward kernels."""
    # Not 0, which times a hidden key's -inf would be NaN. That the scale is 0 is told by the
    # problem's sign.
    doubled = _DOUBLED * abs(scale) if scale else 1.0
    doubled = max(doubled, 2 * float(np.finfo(np.float32).smallest_subnormal))
    return _params(shape, doubled, diagonal, digits)


def backward_params(shape: tuple[int, ...], scale: float, diagonal: int | None) -> np.void:
    """The scalars of the backward kernels."""
    return _params(shape, scale, diagonal, ())


def _params(
    shape: tuple[int, ...],
    scale: float,
    diagonal: int | None,
    digits: tuple[tuple[int, int], ...],
) -> np.void:
    params = np.zeros(1, _PARAMS)[0]
    params["rows"] = math.prod(shape[:-1])
    params["queries"] = _divisor(shape[-2] if len(shape) > 1 else 1)
    params["diagonal"] = diagonal or 0
    for i, (below, size) in enumerate(digits):
        params["mask_below"][i], params["mask_size"][i] = _divisor(below), _divisor(size)
    params["scale"] = scale
    return params


def _divisor(value: int) -> tuple[int, int, int]:
    """The divisor, and a factor and a shift that divide numbers below 2^31 by it.

    With 2^s >= value, the factor is 2^(31 + s) / value, rounded up: by less than 1, so that n times
    it is less than 2^(31 + s) too large, and the quotient right.
    """
    if value >= 2**31:  # of 64-bit numbers, which are divided as they are
        return value, 0, 0
    shift = (value - 1).bit_length()
    return value, -(-(2 ** (31 + shift)) // value), shift


def _fitted(
    mask: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, tuple[tuple[int, int], ...], MaskKind]:
    """The mask with no more digits than the kernels have room for: else it grows, outside in."""
    digits = mask_rows(shape[:-1], mask.shape[:-1])
    grown = 0
    while len(digits) > MAX_MASK_DIGITS:
        grown += 1
        mask = jnp.broadcast_to(mask, (*shape[:grown], *mask.shape[grown:]))
        digits = mask_rows(shape[:-1], mask.shape[:-1])
    # With one key a byte a key is a byte a row.
    return mask, digits, 1 if mask.shape[-1] == shape[-1] else 2


def _run(plan: Plan, operands: list[jax.Array], like: jax.Array, params: np.void) -> jax.Array:
    result = jax.ShapeDtypeStruct(like.shape, like.dtype)
    if plan.workspace is None:
        (out,) = launch.call(plan.launches[0], operands, [result], [params])
        return out
    if len(plan.launches) == 1:
        pairs = jax.ShapeDtypeStruct(plan.workspace, jnp.uint32)
        out, _ = launch.call(plan.launches[0], operands, [result, pairs], [params])
        return out
    workspace = jax.ShapeDtypeStruct(plan.workspace, jnp.float32)
    parts, finish = plan.launches
    (found,) = launch.call(parts, operands, [workspace], [params])
    (out,) = launch.call(finish, [*operands, found], [result], [params])
    return out
