"""The same operations in plain jnp, for the comparison on one device. Shardings do not apply."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    bias: jax.Array | None = None,
    activation: str | None = None,
    out_sharding: None = None,
) -> jax.Array:
    """tensordot, then bias, then tanh-GELU where activation is "gelu"."""
    result = jnp.tensordot(lhs, rhs, axes=contracting_dims)
    if bias is not None:
        result = result + bias
    return jax.nn.gelu(result, approximate=True) if activation == "gelu" else result


def rms_norm(
    x: jax.Array,
    gamma: jax.Array,
    *,
    add: jax.Array | None = None,
    return_input: bool = False,
    epsilon: float = 1e-6,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """h = x + add; y = h / sqrt(mean(h²) + epsilon) · gamma."""
    h = x if add is None else x + add
    y = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + epsilon) * gamma
    return (y, h) if return_input else y
