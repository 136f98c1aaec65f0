"""Quantised norms lowered for CUDA where there is none: the norm's kernel, then jnp."""

import jax
import jax.numpy as jnp
import pytest

import shardops as so
from shardops import errors
from shardops.kernels import compile, library
from shardops.kernels.target import target_for, use_target
from tests.quantize.quantisers import RECIPES

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)


@pytest.mark.parametrize("name", RECIPES)
def test_one_kernel_writes_the_float32_norm(monkeypatch, name):
    """A reference path: of h in float32, so that y is not rounded before it is quantised."""
    monkeypatch.setattr(library, "core", lambda: None)
    x, gamma = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((6, 64, 256), (256,)))

    def f(x, gamma):
        quantizer = RECIPES[name].quantizer("input", "both")
        return so.rms_norm(x, gamma, add=x, return_input=True, quantizer=quantizer)

    with use_target(target_for("sm_90", 132)):
        text = jax.jit(f).trace(x, gamma).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "shardops_launch" in line]
    assert len(calls) == 1
    assert "-> (tensor<384x256xf32>, tensor<384xf32>)" in calls[0]
