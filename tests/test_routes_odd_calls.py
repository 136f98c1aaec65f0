"""Calls that reach the routes by unusual ways: no arguments, no jit, no elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes


def test_jit_without_arguments_on_an_auto_mesh(auto_mesh):
    """JAX then tells the partitioner of no mesh: the ambient one of the trace stands in."""

    @jax.jit
    def constants():
        product = so.gemm(jnp.ones((8, 16)), jnp.ones((16, 8)), out_sharding=P("dp"))
        normal = so.rms_norm(jnp.ones((8, 16)), jnp.ones(16))
        return product, jax.lax.with_sharding_constraint(normal, P("dp", "tp"))

    product, normal = constants()
    np.testing.assert_allclose(product, 16.0)
    np.testing.assert_allclose(normal, 1.0, rtol=1e-5)


def test_jit_without_arguments_and_without_a_mesh():
    assert float(jax.jit(lambda: so.gemm(jnp.ones((2, 3)), jnp.ones((3, 4))).sum())()) == 24


def test_disable_jit(put):
    x, w = put(jnp.ones((8, 16)), "dp", "tp"), put(jnp.ones((16, 8)), "tp")
    gamma = put(jnp.ones(16))
    with jax.disable_jit():
        product = so.gemm(x, w)
        gradient = jax.grad(lambda g: so.layer_norm(x, g).sum())(gamma)
    np.testing.assert_allclose(product, 16.0)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((0, 8, 16), ("dp",)), ((4, 0, 16), ("dp", "tp")), ((4, 8, 0), ("dp", None, "tp"))],
)
def test_gemm_of_no_elements(any_mesh, shape, layout):
    x = meshes.place(any_mesh, jnp.zeros(shape), *layout)
    w = meshes.place(any_mesh, jnp.ones((shape[-1], 4)))
    bias = meshes.place(any_mesh, jnp.ones(4))

    @jax.jit
    def step(x, w, bias):
        out, pull = jax.vjp(lambda x, w, b: so.gemm(x, w, bias=b), x, w, bias)
        return out, *pull(out)

    out, dx, dw, dbias = step(x, w, bias)
    np.testing.assert_array_equal(out, np.ones((*shape[:2], 4)))
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dw, np.zeros(w.shape))
    np.testing.assert_allclose(dbias, shape[0] * shape[1])


@pytest.mark.parametrize(("shape", "layout"), [((0, 16), ("dp",)), ((4, 0, 16), ("dp", "tp"))])
def test_norm_of_no_rows(any_mesh, shape, layout):
    x = meshes.place(any_mesh, jnp.zeros(shape), *layout)
    gamma = meshes.place(any_mesh, jnp.ones(16))

    @jax.jit
    def step(x, gamma):
        y, pull = jax.vjp(so.rms_norm, x, gamma)
        return y, *pull(y)

    y, dx, dgamma = step(x, gamma)
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(dgamma, np.zeros(16))
