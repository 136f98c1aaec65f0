"""Meshes with axes of size 1: a program for many devices, run on few."""

import jax
import numpy as np
import pytest
from jax import P
from jax import numpy as jnp

import shardops as so


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)])
def test_a_quantised_dense_layer_is_the_same(shape: tuple[int, int]) -> None:
    """Tensor and sequence parallel on the mesh, and no mesh: values and gradients."""
    rng = np.random.default_rng(5)
    x, kernel, out = (
        rng.standard_normal(s, np.float32) for s in ((4, 32, 16), (16, 64), (4, 32, 64))
    )
    quantizers = so.recipes.CurrentScaling().dense_quantizers()

    def step(x, kernel, sharding=None):
        y, pull = jax.vjp(
            lambda x, w: so.dense(
                x, w, batch_dims=((0,), ()), quantizers=quantizers, out_sharding=sharding
            ),
            x,
            kernel,
        )
        dy = out if sharding is None else jax.device_put(out, sharding)
        return y, *pull(jnp.asarray(dy))

    wanted = jax.jit(step)(x, kernel)
    devices = jax.devices()[: shape[0] * shape[1]]
    axes = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh(shape, ("dp", "tp"), axes, devices=devices)):
        placed = jax.device_put(x, P("dp", "tp", None)), jax.device_put(kernel, P(None, "tp"))
        got = jax.jit(step, static_argnums=2)(*placed, P("dp", None, "tp"))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
