"""The quantisers on a GPU: the bits of a CPU; norms with quantised results within their format."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import references
from tests.quantize.quantisers import FORMATS, LAYOUTS, RECIPES, ROLES, bits, wide_range

CASES = list(itertools.product(RECIPES, ROLES))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe, role", CASES)
def test_quantized_bits_are_those_of_a_cpu(recipe, role, layout, rng):
    """Of float32. XLA compiles the reference for bfloat16 to other bits on a GPU, now and then."""
    quantizer = RECIPES[recipe].quantizer(role, layout=layout)
    x = wide_range(rng, (256, 384))
    found = []
    for platform in ("cuda", "cpu"):
        with jax.default_device(jax.devices(platform)[0]):
            found.append(bits(jax.jit(lambda x, q: so.quantize(x, q).detach())(x, quantizer)))
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_quantized_norm_is_within_its_format(kind, recipe, rng):
    x = rng.standard_normal((64, 512), np.float32).astype(jnp.bfloat16)
    gamma = rng.standard_normal(512, np.float32)
    quantizer = RECIPES[recipe].quantizer("input")
    norm, want = (
        (so.layer_norm, references.layer_norm_reference)
        if kind == "layer"
        else (so.rms_norm, references.rms_norm_reference)
    )
    got = jax.jit(lambda x, g, q: norm(x, g, quantizer=q))(x, gamma, quantizer)
    relative, smallest, _ = FORMATS["float8_e4m3fn"]
    values = np.asarray(got.dequantize(jnp.float32)).astype(np.float64)
    wanted = want(x, gamma).y
    step = np.asarray(got.scale_inv).astype(np.float64).max()
    # An eighth of what is above the format's largest value is lost by scales of MXFP8 at most.
    lost = 0.125 if recipe == "mxfp8" else relative
    error = np.abs(values - wanted)
    assert (error <= lost * 1.01 * np.abs(wanted) + 2 * smallest * step + 1e-6).all()
