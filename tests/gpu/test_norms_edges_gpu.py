"""The norms' kernels on a GPU where numbers end, in every family of kernels, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import norm_edges
from tests.cases import DTYPES
from tests.norm_edges import EDGES, EPSILON, ROWS

# Rows in registers and in shared memory, of one and of several blocks, whole words and not.
LENGTHS = (33, 1000, 1001, 4096, 16384, 65536, 300_001)
KINDS = {"layer": so.layer_norm, "rms": so.rms_norm}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", LENGTHS)
def test_norm_at_the_edges_of_numbers(cols, dtype, rng):
    """One program for all edges: their shapes are the same."""

    @jax.jit
    def step(x, gamma, dy):
        out = {}
        for kind, norm in KINDS.items():
            parameters = (gamma, 0 * gamma) if kind == "layer" else (gamma,)

            def call(x, *parameters, norm=norm):
                return norm(x, *parameters, epsilon=EPSILON)

            y, pull = jax.vjp(call, x, *parameters)
            names = ("dx", "dgamma", "dbeta")
            out[kind] = {"y": y, **dict(zip(names, pull(dy), strict=False))}
        return out

    for edge, draw in EDGES.items():
        rows = draw(rng, (ROWS, cols), dtype)
        got = step(rows.x, rows.gamma, rows.dy)
        for kind in KINDS:
            norm_edges.check(edge, kind, rows, got[kind])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cols", [33, 896, 1000, 1001, 3000, 3584, 7168, 12288, 20480, 65536])
def test_constant_rows_are_their_own_mean(cols, dtype, rng):
    """Whatever epsilon: an ulp of a large mean would be many of it."""
    values = np.asarray([20608.0, -1288.0, 170.0, 1.0, 0.0])  # sums of them are exact
    x = jnp.asarray(np.repeat(values[:, None], cols, 1), dtype)
    gamma, beta = (jnp.asarray(rng.standard_normal(cols), jnp.float32) for _ in range(2))
    y = jax.jit(lambda x: so.layer_norm(x, gamma, beta, epsilon=EPSILON))(x)
    np.testing.assert_array_equal(y, np.broadcast_to(beta.astype(dtype), x.shape))
    quantizer = so.recipes.DelayedScaling().quantizer("input", "both")
    scaled = jax.jit(lambda x: so.layer_norm(x, gamma, epsilon=EPSILON, quantizer=quantizer))(x)
    assert not scaled.amax.item()
    assert not np.asarray(scaled.data, np.float32).any()


@pytest.mark.parametrize("cols", LENGTHS)
def test_neighbours_of_a_row_that_is_not_finite_keep_their_bits(cols, rng):
    """Of many rows that share blocks, warps and tiles: whatever one holds stays there."""
    x, dy = (rng.standard_normal((40, cols)).astype(jnp.bfloat16) for _ in range(2))
    gamma = rng.standard_normal(cols).astype(np.float32)
    bad = x.copy()
    bad[::4, cols // 3], bad[1::4, -1] = np.nan, np.inf

    @jax.jit
    def step(x, gamma, dy):
        out = []
        for norm in KINDS.values():
            y, pull = jax.vjp(lambda x, norm=norm: norm(x, gamma), x)
            out += [y, *pull(dy)]
        return out

    clean, dirty = (list(map(np.asarray, step(one, gamma, dy))) for one in (x, bad))
    untouched = np.arange(40) % 4 >= 2
    for one, other in zip(clean, dirty, strict=True):
        assert np.isfinite(one.astype(np.float32)).all()
        assert one[untouched].tobytes() == other[untouched].tobytes()
