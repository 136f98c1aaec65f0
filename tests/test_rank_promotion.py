"""Programs that refuse implicit promotion of ranks (`jax_numpy_rank_promotion="raise"`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardops as so

RECIPES = (so.recipes.CurrentScaling(), so.recipes.Block128Scaling(), so.recipes.MXFP8Scaling())


def quantized_forms(recipe: Any) -> dict[str, Callable]:
    name = type(recipe).__name__
    quantizer, quantizers = recipe.quantizer(), recipe.dense_quantizers()
    return {
        f"{name}, rms_norm": lambda x, g, w, b: so.rms_norm(x, g, quantizer=quantizer).dequantize(),
        f"{name}, dense": lambda x, g, w, b: so.dense(x, w, b, quantizers=quantizers),
    }


FORMS = {
    "rms_norm": lambda x, g, w, b: so.rms_norm(x, g, zero_centered_gamma=True),
    "rms_norm, add": lambda x, g, w, b: so.rms_norm(x, g, add=x),
    "layer_norm": lambda x, g, w, b: so.layer_norm(x, g, g, return_input=True),
    "gemm": lambda x, g, w, b: so.gemm(x, w, bias=b),
    "gemm, gelu": lambda x, g, w, b: so.gemm(x, w, bias=b, activation="gelu"),
    "layer_norm_dense": lambda x, g, w, b: so.layer_norm_dense(x, g, w, bias=b),
    "softmax": lambda x, g, w, b: so.softmax(x, mask=jnp.zeros((2, 1, 128), bool)),
    "softmax, causal": lambda x, g, w, b: so.softmax(
        x, mask=jnp.zeros((2, 1, 128), bool), causal="upper_left"
    ),
} | {name: form for recipe in RECIPES for name, form in quantized_forms(recipe).items()}


@pytest.mark.parametrize("name", FORMS)
def test_ranks_need_not_agree(name, rng):
    def total(*arrays: jax.Array) -> jax.Array:
        results = jax.tree.leaves(FORMS[name](*arrays))
        return sum(jnp.sum(jnp.square(r.astype(jnp.float32))) for r in results)

    shapes = ((2, 128, 128), (128,), (128, 256), (256,))
    arrays = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    gradient = jax.grad(total, (0, 1, 2, 3))
    allowed = jax.jit(gradient)(*arrays)
    with jax.numpy_rank_promotion("raise"):
        refused = gradient(*arrays)
    for a, b in zip(refused, allowed, strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5 * jnp.max(jnp.abs(b)))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_ranks_need_not_agree_in_second_derivatives_and_batches_of_parameters(name, rng):
    def total(x: jax.Array, g: jax.Array) -> jax.Array:
        y = FORMS[name](x, g, None, None)
        return sum(jnp.sum(jnp.square(r)) for r in jax.tree.leaves(y))

    x, g = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 3, 128), (3, 128)))
    g, x = (g[:, :128], x) if name != "softmax" else (g, x[:, :1].repeat(2, 1))
    batched = jax.vmap(jax.grad(total, (0, 1)), (None, 0))
    curved = jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(total)(x, g[0]))))
    allowed = (*batched(x, g), curved(x))
    with jax.numpy_rank_promotion("raise"):
        refused = (*batched(x, g), curved(x))
    for a, b in zip(refused, allowed, strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5 * jnp.max(jnp.abs(b)) + 1e-12)
