"""Exported programs: quantised arrays and quantisers as arguments, and sizes left open."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.kernels.target import target_for, use_target

RECIPES = (
    so.recipes.DelayedScaling(amax_history_len=3, margin=1, amax_compute="most_recent"),
    so.recipes.CurrentScaling(),
    so.recipes.Block128Scaling(),
    so.recipes.MXFP8Scaling(),
)
OPS = {
    "rms_norm": lambda x: so.rms_norm(x, jnp.ones(x.shape[-1])),
    "softmax": lambda x: so.softmax(x),
    "gemm": lambda x: so.gemm(x, jnp.ones((x.shape[-1], 32))),
    "quantize": lambda x: so.quantize(x, so.recipes.CurrentScaling().quantizer()).data,
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_quantised_arrays_and_quantisers_cross_an_export(recipe, rng):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")

    def step(quantizers, x, before):
        scaled = so.quantize(x + before.dequantize(), quantizers.input)
        return quantizers, scaled, quantizers.kernel.update(x.max())

    x = jnp.asarray(rng.normal(size=(128, 256)), jnp.float32)
    quantizers = recipe.dense_quantizers()
    before = so.quantize(x, quantizers.kernel)
    exported = jax.export.export(jax.jit(step))(quantizers, x, before).serialize()
    found = jax.export.deserialize(exported).call(quantizers, x, before)
    wanted = jax.jit(step)(quantizers, x, before)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert found[1].block == wanted[1].block
    assert found[1].mode is wanted[1].mode
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


def _left_open(text: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(text), jnp.float32)


@pytest.mark.parametrize("causal", ["upper_left", "bottom_right"])
def test_a_causal_softmax_of_any_number_of_queries(causal, rng):
    def f(x):
        return so.softmax(x, causal=causal)

    exported = jax.export.export(jax.jit(f))(_left_open("2, s, s"))
    x = jnp.asarray(rng.normal(size=(2, 7, 7)), jnp.float32)
    np.testing.assert_allclose(exported.call(x), f(x), rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_a_size_left_open_is_refused_where_a_kernel_would_run(op):
    export = jax.export.export(jax.jit(OPS[op]), platforms=["cuda"])
    name = "norm_forward" if op == "rms_norm" else op
    words = rf"^{name}\w*: x is of shape \(b, 64\); expected sizes that are numbers\. Export for"
    with use_target(target_for("sm_90", 132)), pytest.raises(ValueError, match=words):
        export(_left_open("b, 64"))
    with so.use_kernels(""):
        assert export(_left_open("b, 64")).in_avals[0].ndim == 2
