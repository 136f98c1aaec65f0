"""The kernel that orders MXFP8 scales, on a GPU: of any, as cuBLASLt has the product on sm_100."""

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import scale_tiles
from tests.kernels.scale_order import in_tiles, operands


def test_scales_of_both_operands_come_into_cublaslts_order(rng) -> None:
    for pair in operands(rng, more=10):
        matrices = [matrix for matrix, _ in pair]

        @jax.jit
        def order(*codes: jax.Array, matrices=matrices) -> tuple[jax.Array, ...]:
            scales = [jax.lax.bitcast_convert_type(c, jnp.float8_e8m0fnu) for c in codes]
            tiles = scale_tiles.tiled(*zip(matrices, scales, strict=True))
            return tuple(jax.lax.bitcast_convert_type(t, jnp.uint8) for t in tiles)

        found = order(*(jnp.asarray(codes) for _, codes in pair))
        for tiles, (matrix, codes) in zip(found, pair, strict=True):
            np.testing.assert_array_equal(np.asarray(tiles), in_tiles(matrix, codes))
