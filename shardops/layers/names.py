"""Names that layers give to values, for policies of `jax.checkpoint`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardops.primitives.scaled import ScaledArray


def named(value: jax.Array, name: str) -> jax.Array:
    """`value`, which policies know by `name`."""
    return checkpoint_name(value, name)


def named_data(part: ScaledArray, name: str) -> ScaledArray:
    """A quantised array whose data, and scales of blocks, policies know by `name`."""
    assert part.data is not None
    # By its bits: see `shardops.primitives.quantize`.
    bits = checkpoint_name(jax.lax.bitcast_convert_type(part.data, jnp.uint8), name)
    part = replace(part, data=jax.lax.bitcast_convert_type(bits, part.data.dtype))
    scale_inv = part.scale_inv
    if scale_inv is None or part.block is None:
        return part
    if scale_inv.dtype.itemsize > 1:
        return replace(part, scale_inv=checkpoint_name(scale_inv, name))
    bits = checkpoint_name(jax.lax.bitcast_convert_type(scale_inv, jnp.uint8), name)
    return replace(part, scale_inv=jax.lax.bitcast_convert_type(bits, scale_inv.dtype))
