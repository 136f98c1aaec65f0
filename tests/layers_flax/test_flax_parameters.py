"""Parameters of Flax's own layers load as they are, and give Flax's values."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardops.layers import linen as so_linen
from shardops.layers import nnx as so_nnx
from tests import cases
from tests.closeness import assert_close

B, S, D = 2, 6, 32
RNGS = nnx.Rngs(0)

NNX = {
    "Linear": (nnx.Linear(D, 24, rngs=RNGS), so_nnx.Dense(D, 24, rngs=RNGS)),
    "no bias": (
        nnx.Linear(D, 24, use_bias=False, rngs=RNGS),
        so_nnx.Dense(D, 24, use_bias=False, rngs=RNGS),
    ),
    "LinearGeneral": (
        nnx.LinearGeneral((S, D), (3, 4), axis=(1, -1), rngs=RNGS),
        so_nnx.Dense((S, D), (3, 4), axis=(1, -1), rngs=RNGS),
    ),
    "LayerNorm": (nnx.LayerNorm(D, rngs=RNGS), so_nnx.LayerNorm(D, rngs=RNGS)),
    "RMSNorm": (nnx.RMSNorm(D, rngs=RNGS), so_nnx.RMSNorm(D, rngs=RNGS)),
    "MultiHeadAttention": (
        nnx.MultiHeadAttention(4, D, 16, decode=False, rngs=RNGS),
        so_nnx.MultiHeadAttention(4, D, 16, rngs=RNGS),
    ),
    "grouped queries": (
        nnx.MultiHeadAttention(4, D, num_kv_heads=2, decode=False, rngs=RNGS),
        so_nnx.MultiHeadAttention(4, D, num_kv_heads=2, rngs=RNGS),
    ),
}
LINEN = {
    "Dense": (nn.Dense(24), so_linen.Dense(24)),
    "DenseGeneral": (
        nn.DenseGeneral((3, 4), axis=(1, -1)),
        so_linen.Dense((3, 4), axis=(1, -1)),
    ),
    "LayerNorm": (nn.LayerNorm(), so_linen.LayerNorm()),
    "RMSNorm": (nn.RMSNorm(), so_linen.RMSNorm()),
    "MultiHeadDotProductAttention": (
        nn.MultiHeadDotProductAttention(4, qkv_features=16),
        so_linen.MultiHeadAttention(4, qkv_features=16),
    ),
}


def drawn_like(rng, tree):
    return jax.tree.map(lambda a: cases.random(rng, a.shape, "float32"), tree)


@pytest.mark.parametrize("name", NNX)
def test_nnx_layers_take_the_parameters_of_flax(rng, name):
    flax, ours = NNX[name]
    state = nnx.state(flax, nnx.Param)
    kept = drawn_like(rng, nnx.to_pure_dict(state))
    x = cases.random(rng, (B, S, D), "float32")
    for module in (flax, ours):
        held = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(held, kept)
        nnx.update(module, held)
    assert_close(ours(x), np.asarray(flax(x), np.float64), reduced=4 * S * D, roundings=4)


@pytest.mark.parametrize("name", LINEN)
def test_linen_layers_take_the_parameters_of_flax(rng, name):
    flax, ours = LINEN[name]
    x = cases.random(rng, (B, S, D), "float32")
    variables = drawn_like(rng, flax.init(jax.random.key(0), x))
    assert_same_shapes(nn.unbox(ours.init(jax.random.key(0), x)), variables)
    want = np.asarray(flax.apply(variables, x), np.float64)
    assert_close(ours.apply(variables, x), want, reduced=4 * S * D, roundings=4)


def assert_same_shapes(ours, flax):
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, flax)


def test_layers_that_are_several_of_flax_take_the_parameters_of_each(rng):
    """A norm, a product into heads and a gated MLP, under names of their own."""
    x = cases.random(rng, (B, S, D), "float32")
    ours = so_linen.LayerNormDense((3, 4), norm="rms_norm")
    norm, dense = nn.RMSNorm(), nn.DenseGeneral((3, 4))
    of_norm = drawn_like(rng, norm.init(jax.random.key(0), x)["params"])
    of_dense = drawn_like(rng, dense.init(jax.random.key(0), x)["params"])
    got = ours.apply({"params": {"norm": of_norm, "dense": of_dense}}, x)
    want = dense.apply({"params": of_dense}, norm.apply({"params": of_norm}, x))
    assert_close(got, np.asarray(want, np.float64), reduced=4 * D, roundings=4)


@pytest.mark.parametrize("activation", ["gelu", ("silu", "linear")])
def test_mlp_takes_the_parameters_of_flax(rng, activation):
    x = cases.random(rng, (B, S, D), "float32")
    gated = isinstance(activation, tuple)
    norm, up = nnx.LayerNorm(D, rngs=RNGS), nnx.LinearGeneral(D, (2, 8) if gated else 8, rngs=RNGS)
    down = nnx.Linear(8, D, rngs=RNGS)
    ours = so_nnx.LayerNormMLP(D, 8, activation=activation, rngs=RNGS)
    for name, module in (("norm", norm), ("up", up), ("down", down)):
        nnx.update(getattr(ours, name), nnx.state(module, nnx.Param))
    hidden = up(norm(x))
    hidden = nnx.silu(hidden[..., 0, :]) * hidden[..., 1, :] if gated else nnx.gelu(hidden)
    assert_close(ours(x), np.asarray(down(hidden), np.float64), reduced=4 * D, roundings=8)


def test_initial_values_are_those_of_flax():
    """Drawn from the same keys by the same initializer."""
    flax = nnx.LinearGeneral((4, D), (3, 8), axis=(-2, -1), rngs=nnx.Rngs(3))
    ours = so_nnx.Dense((4, D), (3, 8), axis=(-2, -1), rngs=nnx.Rngs(3))
    np.testing.assert_array_equal(ours.kernel[...], flax.kernel[...])
    x = jnp.ones((2, 4, D))
    flax = nn.DenseGeneral((3, 8), axis=(-2, -1)).init(jax.random.key(3), x)
    ours = so_linen.Dense((3, 8), axis=(-2, -1)).init(jax.random.key(3), x)
    np.testing.assert_array_equal(ours["params"]["kernel"], flax["params"]["kernel"])
