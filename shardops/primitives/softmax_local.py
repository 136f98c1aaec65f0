"""Softmax on one device: the jnp reference, which says what it means, and the kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import softmax as kernels
from shardops.primitives.local import local_primitive

_OF_WHOLE_LOGITS = 1e-35  # times float32's largest number: exp of its negative is 0


def forward_reference(
    x: jax.Array,
    *extra: jax.Array,
    scale: float,
    mask: bool,
    diagonal: int | None,
    first: bool,
) -> tuple[jax.Array, ...]:
    """Softmax in jnp: what the kernel computes, and what a CPU runs.

    Args:
      x: [*batch, q, k].
      extra: with `mask` one of the rank of x; with `first` an int32 scalar: which query row 0 is.
      diagonal: query i sees keys up to i + diagonal; None: all.
    """
    rest = iter(extra)
    hidden = next(rest) if mask else None
    if diagonal is not None:
        hidden = _with_later_keys(x.shape, hidden, next(rest) if first else 0, diagonal)
    # A scale of 0 leaves 0 of a finite logit and NaN of others.
    v, magnitude = float(np.sign(scale)) * x.astype(jnp.float32), abs(scale) or 1.0
    seen = None if hidden is None else ~hidden
    top = jnp.max(v, -1, keepdims=True, initial=-jnp.inf, where=seen)
    weights = _weights(v, top, magnitude)
    if hidden is None:
        return ((weights / jnp.sum(weights, -1, keepdims=True)).astype(x.dtype),)
    e = jnp.where(hidden, 0.0, weights)
    # `where` once more: a hidden place of a row that is all hidden (0 / 0) or NaN stays 0.
    y = jnp.where(hidden, 0.0, e / jnp.sum(e, -1, keepdims=True))
    return (y.astype(x.dtype),)


def _weights(v: jax.Array, top: jax.Array, magnitude: float) -> jax.Array:
    """exp(magnitude · (v - top)): the difference first.

    Of scaled logits XLA may round one before the difference and not the other, and then half a unit
    in the last place of a large logit goes into exp. A difference that overflows has the weight 0,
    as it should, unless the magnitude is next to nothing: those are taken of halves, which would
    cost others the halves that are subnormal, for devices may take these as 0.
    """
    if magnitude > _OF_WHOLE_LOGITS:
        return jnp.exp((v - top) * magnitude)
    return jnp.exp((0.5 * v - 0.5 * top) * (2 * magnitude))


def _with_later_keys(
    shape: tuple[int, ...], hidden: jax.Array | None, first: jax.Array | int, diagonal: int
) -> jax.Array:
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape[-2:], dim) for dim in (0, 1))
    later = key > query + first + diagonal
    return later if hidden is None else hidden | later


def backward_reference(
    dy: jax.Array,
    y: jax.Array,
    *extra: jax.Array,
    scale: float,
    diagonal: int | None = None,
    first: bool = False,
) -> tuple[jax.Array, ...]:
    """Softmax's gradient in jnp, from the result as it was rounded.

    dx = scale · y · (dy - sum_k(y · dy)). A row that is all masked has y = 0, so dx = 0. `diagonal`
    and `first` as of the forward: later keys take no part, whatever dy is there.
    """
    wide, dwide = y.astype(jnp.float32), dy.astype(jnp.float32)
    if diagonal is None:
        dx = scale * wide * (dwide - jnp.sum(wide * dwide, -1, keepdims=True))
        return (dx.astype(y.dtype),)
    later = _with_later_keys(y.shape, None, extra[0] if first else 0, diagonal)
    total = jnp.sum(wide * dwide, -1, keepdims=True, where=~later)
    dx = jnp.where(later, 0.0, scale * wide * (dwide - total))
    return (dx.astype(y.dtype),)


def _forward_kernel(
    x: jax.Array,
    *extra: jax.Array,
    scale: float,
    mask: bool,
    diagonal: int | None,
    first: bool,
) -> tuple[jax.Array, ...]:
    if x.shape[-1] > kernels.MAX_KEYS or abs(scale) > kernels.MAX_SCALE:
        return forward_reference(x, *extra, scale=scale, mask=mask, diagonal=diagonal, first=first)
    rest = iter(extra)
    hidden = next(rest) if mask else None
    row = next(rest) if first else None
    return (kernels.softmax_forward(x, hidden, row, scale=scale, diagonal=diagonal),)


def _backward_kernel(
    dy: jax.Array,
    y: jax.Array,
    *extra: jax.Array,
    scale: float,
    diagonal: int | None = None,
    first: bool = False,
) -> tuple[jax.Array, ...]:
    if y.shape[-1] > kernels.MAX_KEYS:
        return backward_reference(dy, y, *extra, scale=scale, diagonal=diagonal, first=first)
    row = extra[0] if first else None
    return (kernels.softmax_backward(dy, y, row, scale=scale, diagonal=diagonal),)


local_forward = local_primitive("shardops_softmax_forward", forward_reference, _forward_kernel)
local_backward = local_primitive("shardops_softmax_backward", backward_reference, _backward_kernel)
