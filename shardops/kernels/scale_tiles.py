"""The order in which cuBLASLt reads scales of 32 elements.

Tiles of 128 rows by 4 blocks lie one after the other; in one, rows 32 apart lie side by side. What
one function does the other undoes, in transposes that XLA takes out where they meet.
"""

import jax
import jax.numpy as jnp

ROWS, BLOCKS = 128, 4
_ORDER = (0, 3, 2, 1, 4)


def tiled(scales: jax.Array) -> jax.Array:
    """Of scales [rows, blocks], which fill tiles: [rows / 128, blocks / 4, 32, 4, 4]."""
    rows, blocks = scales.shape
    parts = scales.reshape(rows // ROWS, 4, 32, blocks // BLOCKS, BLOCKS)
    return jnp.transpose(parts, _ORDER)


def untiled(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What was tiled, in this shape."""
    return jnp.transpose(tiles, _ORDER).reshape(shape)


def shape_of(rows: int, blocks: int) -> tuple[int, ...]:
    """The shape of what `tiled` makes of scales [rows, blocks]."""
    return (rows // ROWS, blocks // BLOCKS, 32, 4, BLOCKS)
