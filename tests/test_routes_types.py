"""Explicit meshes: under vmap and second derivatives results have the types that were traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardops as so


@pytest.fixture
def cube():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        yield mesh


def plain_rms_norm(x, gamma):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gamma


def losses(norm):
    def loss(x, gamma):
        return jnp.sin(norm(x, gamma)).sum()

    def second_by_x(x, gamma):
        return jax.grad(lambda x: jnp.sin(jax.grad(loss)(x, gamma)).sum())(x)

    def second_by_gamma(x, gamma):
        return jax.grad(lambda g: jnp.sin(jax.grad(loss, 1)(x, g)).sum())(gamma)

    return loss, second_by_x, second_by_gamma


def same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=3e-5)


@pytest.mark.parametrize("gamma_axis", ["a", "b", "c"])
def test_second_derivatives_with_gamma_sharded_like_rows(rng, cube, gamma_axis):
    x, gamma = (rng.standard_normal(s).astype(np.float32) for s in ((4, 8, 16), 16))
    placed = jax.device_put(x, P("a", "b")), jax.device_put(gamma, P(gamma_axis))
    for ours, plain in list(zip(losses(so.rms_norm), losses(plain_rms_norm), strict=True))[1:]:
        same(ours(*placed), plain(x, gamma))


@pytest.mark.parametrize("gamma_is_batched", [False, True])
def test_per_example_gradients_with_gamma_sharded_like_rows(rng, cube, gamma_is_batched):
    x = rng.standard_normal((4, 8, 4, 16)).astype(np.float32)
    gamma = rng.standard_normal((4, 16) if gamma_is_batched else 16).astype(np.float32)
    spec = P(None, "a") if gamma_is_batched else P("a")
    placed = jax.device_put(x, P(None, "a")), jax.device_put(gamma, spec)
    axes = (0, 0 if gamma_is_batched else None)
    ours, plain = (jax.grad(losses(norm)[0], (0, 1)) for norm in (so.rms_norm, plain_rms_norm))
    same(jax.vmap(ours, axes)(*placed), jax.vmap(plain, axes)(x, gamma))


def test_all_operands_of_a_product_batched(rng, cube):
    """A batched bias does not lend its sharding to the result."""
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((4, 8, 16), (4, 16, 8), (4, 8)))
    placed = jax.device_put(x, P()), jax.device_put(w, P()), jax.device_put(b, P(None, "a"))
    got = jax.vmap(lambda x, w, b: so.gemm(x, w, bias=b))(*placed)
    same(got, x @ w + b[:, None])
    assert jax.typeof(got).sharding.spec == P(None, None, None)
