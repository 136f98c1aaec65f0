"""Names that layers give to values, for policies of `jax.checkpoint`."""

import jax
from jax.ad_checkpoint import checkpoint_name

GEMM = "shardops.gemm"  # a product, before its activation
NORM = "shardops.norm"  # a normalised input that is not quantised


def named(value: jax.Array, name: str) -> jax.Array:
    """`value`, which policies know by `name`."""
    return checkpoint_name(value, name)
