"""Flax modules, NNX and Linen, whose products and norms are ops of shardops."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardops as so
from tests.fuse.programs import DIM, HIDDEN, draw, kinds, loss_of, ops_in

pytestmark = pytest.mark.usefixtures("one_device")

WANT = {"return_input": 1, "add": 1, "bias+activation": 1, "bias": 3}


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gamma = nnx.Param(jnp.ones(DIM))
        self.up = nnx.Linear(DIM, HIDDEN, dot_general=so.dot_general, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, dot_general=so.dot_general, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.down(nnx.gelu(self.up(so.rms_norm(x, self.gamma[...]))))
        return x * self.down(self.up(so.rms_norm(x, self.gamma[...])))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = self.param("gamma", nn.initializers.ones, (DIM,))
        up = nn.Dense(HIDDEN, dot_general=so.dot_general)
        down = nn.Dense(DIM, dot_general=so.dot_general)
        x = x + down(nn.gelu(up(so.rms_norm(x, gamma))))
        return x * down(up(so.rms_norm(x, gamma)))


@pytest.fixture
def x(rng):
    return draw(rng, 4, 8, DIM)


def test_linen_apply(x) -> None:
    module = Linen()
    variables = module.init(jax.random.key(0), x)
    fused = so.fuse(module.apply)
    np.testing.assert_allclose(
        jax.jit(fused)(variables, x), module.apply(variables, x), rtol=1e-5, atol=1e-5
    )
    assert kinds(fused.report) == WANT
    want, got = (jax.jit(jax.grad(loss_of(f)))(variables, x) for f in (module.apply, fused))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("how", ["closed over", "argument", "split"])
def test_nnx(x, how) -> None:
    model = Nnx(nnx.Rngs(0))
    want = model(x)
    if how == "closed over":
        fused = so.fuse(model)
        got = fused(x)
    elif how == "argument":
        fused = so.fuse(lambda model, x: model(x))
        got = nnx.jit(fused)(model, x)
    else:
        graph, state = nnx.split(model)
        fused = so.fuse(lambda state, x: nnx.merge(graph, state)(x))
        got = jax.jit(fused)(state, x)
        counts = ops_in(jax.make_jaxpr(jax.grad(loss_of(fused)))(state, x))
        assert (counts["backward, residual"], counts["backward"]) == (2, 0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert kinds(fused.report) == WANT


def test_nnx_gradients(x) -> None:
    model = Nnx(nnx.Rngs(0))
    plain = nnx.grad(lambda model: loss_of(model)(x))(model)
    fused = nnx.grad(lambda model: loss_of(so.fuse(model))(x))(model)
    for g, w in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-4)
