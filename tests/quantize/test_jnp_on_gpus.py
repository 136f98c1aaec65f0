"""Quantisation in jnp, lowered for a CUDA device."""

import re

import jax
import jax.numpy as jnp
import pytest

import shardops as so

RECIPES = {"current": so.recipes.CurrentScaling(), "block": so.recipes.Block128Scaling()}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cast_back_does_not_undo_the_rounding(recipe, normed):
    """XLA for GPUs drops a cast to a narrower type and back where nothing stands between them."""
    quantizer = RECIPES[recipe].quantizer(layout="both")

    def rounded(x):
        if normed:
            return so.rms_norm(x, jnp.ones(256), quantizer=quantizer).dequantize()
        return so.quantize(x, quantizer).dequantize()

    with so.use_kernels(""):
        traced = jax.jit(rounded).trace(jax.ShapeDtypeStruct((128, 256), jnp.float32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"optimization_barrier %\d+ : tensor<\d+x\d+xf8E4M3FN>", text)) == 2
