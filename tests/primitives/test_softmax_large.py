"""Softmax of logits and scales far from 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value", [-1e30, -2.38e38, -3.3895e38, 1e12])
def test_equal_large_logits_share_the_row(value, masked, dtype):
    """As of a query whose keys were all hidden by an additive mask."""
    x = jnp.full((3, 128), value, dtype)
    mask = jnp.zeros(x.shape, bool).at[:, 64:].set(True) if masked else None
    seen = 64 if masked else 128

    def f(x):
        return so.softmax(x, mask=mask, scale=128**-0.5)

    got = np.asarray(jax.jit(f)(x), np.float64)
    np.testing.assert_allclose(got[:, :seen], 1 / seen, rtol=1e-6)
    dx = np.asarray(jax.jit(jax.grad(lambda x: f(x)[0, 0].astype(jnp.float32)))(x), np.float64)
    want = np.where(np.arange(seen) == 0, 1 - 1 / seen, -1 / seen) / seen * 128**-0.5
    np.testing.assert_allclose(dx[0, :seen], want, rtol=1e-2)
    assert not dx[1:].any()


ENDS = [  # rows and scales
    ([3e38, -3e38, 0.0], 1e-20),
    ([3e38, 0.0, 0.0], 3e38),
    ([3e38, 0.0, -3e38], 1.2e-38),
    ([3e38, 0.0, -3e38], -1.2e-38),
    ([2e-38, 0.0, -1.5e-38], 3e38),
    ([2e-38, 0.0, -1.5e-38], -1.8e38),
    ([2e-38, 0.0, -1.5e-38], 1.1e38),
]


@pytest.mark.parametrize(("row", "scale"), ENDS)
def test_logits_and_scales_at_the_ends_of_float32(row, scale):
    z = np.asarray(row, np.float32).astype(np.float64) * np.float64(np.float32(scale))
    want = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    got = jax.jit(lambda x: so.softmax(x, scale=scale))(jnp.asarray([row], jnp.float32))
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-30)
