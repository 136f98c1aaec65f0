"""Quantised products under checkpoint policies: what is saved of 8-bit data is saved as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops import checkpoint_policies

POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "quantized": checkpoint_policies.save_quantized,
}
RECIPES = {
    "delayed": so.recipes.DelayedScaling(),
    "current": so.recipes.CurrentScaling(),
    "block": so.recipes.Block128Scaling(),
    "mxfp8": so.recipes.MXFP8Scaling(),
}


def _product(recipe, x, w):
    scaled = so.quantize(x, recipe.quantizer(layout="both"))
    return so.gemm(scaled, so.quantize(w, recipe.quantizer("kernel", layout="both")))


def _activated(recipe, x, w):
    return so.gemm(so.quantize(x, recipe.quantizer()), w, activation="gelu")


def _normalised(recipe, x, w):
    return so.gemm(so.rms_norm(x, jnp.ones(x.shape[-1]), quantizer=recipe.quantizer()), w)


def _gradient(recipe, x, w):
    def f(x):
        return jnp.sum(jnp.square(so.gemm(so.quantize(x, recipe.quantizer()), w)))

    return jax.grad(f)(x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", [_product, _activated, _normalised, _gradient])
def test_values_and_gradients_are_those_without_a_checkpoint(rng, form, recipe, policy):
    # Magnitudes over several binades: subnormal 8-bit numbers, and some above 240.
    x, w = (
        jnp.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-9, 3, shape), jnp.float32)
        for shape in ((128, 256), (256, 128))
    )

    def total(x, w):
        return jnp.sum(jnp.square(form(RECIPES[recipe], x, w)))

    wanted = jax.jit(jax.value_and_grad(total, (0, 1)))(x, w)
    checkpointed = jax.checkpoint(total, policy=POLICIES[policy])
    found = jax.jit(jax.value_and_grad(checkpointed, (0, 1)))(x, w)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            one, other, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(other)))
        )
