"""Softmax on one device: the jnp reference, which says what it means. There is no kernel yet."""

import jax
import jax.numpy as jnp

from shardops.primitives.local import local_primitive


def forward_reference(
    x: jax.Array,
    *extra: jax.Array,
    scale: float,
    mask: bool,
    diagonal: int | None,
    first: bool,
) -> tuple[jax.Array, ...]:
    """Softmax in jnp: what a kernel is to compute, and what every platform runs until there is one.

    Args:
      x: [*batch, q, k].
      extra: with `mask` one of the rank of x; with `first` an int32 scalar: which query row 0 is.
      diagonal: query i sees keys up to i + diagonal; None: all.
    """
    rest = iter(extra)
    hidden = next(rest) if mask else None
    if diagonal is not None:
        hidden = _with_later_keys(x.shape, hidden, next(rest) if first else 0, diagonal)
    z = scale * x.astype(jnp.float32)
    if hidden is None:
        e = jnp.exp(z - jnp.max(z, -1, keepdims=True, initial=-jnp.inf))
        return ((e / jnp.sum(e, -1, keepdims=True)).astype(x.dtype),)
    top = jnp.max(z, -1, keepdims=True, initial=-jnp.inf, where=~hidden)
    e = jnp.where(hidden, 0.0, jnp.exp(z - top))
    # `where` once more: a hidden place of a row that is all hidden (0 / 0) or NaN stays 0.
    y = jnp.where(hidden, 0.0, e / jnp.sum(e, -1, keepdims=True))
    return (y.astype(x.dtype),)


def _with_later_keys(
    shape: tuple[int, ...], hidden: jax.Array | None, first: jax.Array | int, diagonal: int
) -> jax.Array:
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape[-2:], dim) for dim in (0, 1))
    later = key > query + first + diagonal
    return later if hidden is None else hidden | later


def backward_reference(dy: jax.Array, y: jax.Array, *, scale: float) -> tuple[jax.Array, ...]:
    """Softmax's gradient in jnp, from the result as it was rounded.

    dx = scale · y · (dy - sum_k(y · dy)). A row that is all masked has y = 0, so dx = 0.
    """
    wide, dwide = y.astype(jnp.float32), dy.astype(jnp.float32)
    dx = scale * wide * (dwide - jnp.sum(wide * dwide, -1, keepdims=True))
    return (dx.astype(y.dtype),)


# The second function is what CUDA runs: a kernel goes there.
local_forward = local_primitive("shardops_softmax_forward", forward_reference, forward_reference)
local_backward = local_primitive(
    "shardops_softmax_backward", backward_reference, backward_reference
)
