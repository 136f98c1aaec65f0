"""Names that layers give to values, for policies of `jax.checkpoint`."""

from dataclasses import replace

import jax
from jax.ad_checkpoint import checkpoint_name

from shardops.primitives.saved import packed, unpacked
from shardops.primitives.scaled import ScaledArray


def named(value: jax.Array, name: str) -> jax.Array:
    """`value`, which policies know by `name`."""
    return checkpoint_name(value, name)


def named_data(part: ScaledArray, name: str) -> ScaledArray:
    """A quantised array whose data, and scales of blocks, policies know by `name`."""
    assert part.data is not None
    part = replace(part, data=_named_bits(part.data, name))
    if part.scale_inv is None or part.block is None:
        return part
    return replace(part, scale_inv=_named_bits(part.scale_inv, name))


def _named_bits(array: jax.Array, name: str) -> jax.Array:
    return unpacked(jax.tree.map(lambda kept: checkpoint_name(kept, name), packed(array)))
