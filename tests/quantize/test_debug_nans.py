"""`jax_debug_nans` finds nothing in gradients that have no NaN, op by op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so

RECIPE = so.recipes.MXFP8Scaling()  # powers of two have no 0 for a cotangent that is not there


def product(x, gamma, kernel):
    of_x, of_kernel = (RECIPE.quantizer(role=role) for role in ("input", "kernel"))
    return so.gemm(so.quantize(x, of_x), so.quantize(kernel, of_kernel)).sum()


def norm(x, gamma, kernel):
    y, h = so.rms_norm(x, gamma, quantizer=RECIPE.quantizer(role="input"), return_input=True)
    return so.gemm(y, kernel).sum() + h.sum()


def layer(x, gamma, kernel):
    return so.layer_norm_dense(x, gamma, kernel, quantizers=RECIPE.dense_quantizers()).sum()


@pytest.mark.parametrize("function", [product, norm, layer])
def test_eager_gradients_under_debug_nans(function, rng):
    shapes = ((128, 128), 128, (128, 128))
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    gradient = jax.grad(function, (0, 1, 2))
    with jax.debug_nans(True):
        found = gradient(*arrays)
    for got, want in zip(found, jax.jit(gradient)(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert jnp.abs(found[0]).max() > 0
