"""A residual summed by the norm of a layer: the sum apart, and kernels for the sum are gone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.kernels.target import target_for, use_target
from shardops.layers import transformer
from shardops.layers.projections import Norm, Weights
from tests import cases, meshes
from tests.closeness import assert_close
from tests.layers.eight_bits import RECIPES

D, F = 64, 128


def fused(x, add, gamma, kernels, qs):
    y, h = so.layer_norm_dense(
        x,
        gamma,
        kernels[0],
        norm="rms_norm",
        add=add,
        return_input=True,
        quantizers=None if qs is None else qs[0],
    )
    z, g = so.layer_norm_mlp(
        h, gamma, kernels, norm="rms_norm", add=x, return_input=True, quantizers=qs
    )
    return y, z, g


def apart(x, add, gamma, kernels, qs):
    h = x + add
    of_first = None if qs is None else qs[0]
    y = so.layer_norm_dense(h, gamma, kernels[0], norm="rms_norm", quantizers=of_first)
    g = h + x
    return y, so.layer_norm_mlp(g, gamma, kernels, norm="rms_norm", quantizers=qs), g


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (None, "none"),
        (None, "explicit"),
        ("delayed", "auto"),
        ("current", "none"),
        ("block", "explicit"),
        ("mxfp8", "none"),
    ],
)
def test_a_residual_summed_by_the_norm_is_the_sum_before_it(rng, recipe, kind):
    """More sequences than positions, so that blocks along the longest dim turn the rows over."""
    shape, spec = (256, 2, D), ("dp",)
    qs = None
    if recipe is not None:
        qs = tuple(RECIPES[recipe].dense_quantizers() for _ in range(2))
    arrays = [cases.random(rng, shape, "float32") for _ in range(2)]
    gamma = cases.random(rng, (D,), "float32")
    kernels = tuple(cases.random(rng, s, "float32", 0.1) for s in ((D, F), (F, D)))
    cotangents = [
        cases.random(rng, s, "float32") for s in ((*shape[:2], F), (*shape[:2], D), shape)
    ]

    def run(function):
        @jax.jit
        def step(x, add, gamma, kernels, cotangents):
            def layer(*given):
                return function(*given, None if qs is None else so.recipes.watch(qs))

            value, pull = jax.vjp(layer, x, add, gamma, kernels)
            return value, pull(cotangents)

        if kind == "none":
            return step(*arrays, gamma, kernels, tuple(cotangents))
        with meshes.entered(kind, {"dp": 4}) as mesh:
            placed = [meshes.place(mesh, a, *spec) for a in (*arrays, *cotangents)]
            return step(*placed[:2], gamma, kernels, tuple(placed[2:]))

    got, want = run(fused), run(apart)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        assert_close(one, np.asarray(other, np.float64), reduced=4 * shape[0] * shape[1])


@pytest.mark.parametrize("recipe", [None, "block"])
def test_no_kernel_of_its_own_sums_the_stream(recipe):
    """Lowered for a GPU: of a layer's four sums of the stream (two residuals, two of cotangents)
    the last residual alone is an addition; the others are in the four launches of norms."""
    x = jnp.zeros((2, 128, 256), jnp.bfloat16)
    quantizers = ((None, None, None), None)
    if recipe is not None:
        q = RECIPES[recipe].dense_quantizers()
        quantizers = ((q, q, None), (q, q))

    def loss(x, gamma, kernels):
        query, out, up, down = map(Weights, kernels)
        y = transformer.transformer_layer(
            x,
            Norm(gamma),
            transformer.AttentionWeights(query, query, query, out),
            Norm(gamma),
            transformer.MLPWeights(up, down),
            heads=transformer.Heads.of(256, 4),
            activation="gelu",
            quantizers=quantizers,
        )
        return jnp.sum(y, dtype=jnp.float32)

    shapes = ((256, 4, 64), (4, 64, 256), (256, 512), (512, 256))
    kernels = tuple(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    with use_target(target_for("sm_90", 132)):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, jnp.zeros(256), kernels)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    sums = re.findall(r"stablehlo\.add .*tensor<2x128x256xbf16>", text)
    assert len(sums) == 1


def test_a_residual_of_another_shape_or_dtype_is_refused():
    x, gamma, kernel = jnp.ones((4, 8)), jnp.ones(8), jnp.ones((8, 8))
    with pytest.raises(ValueError, match=r"layer_norm_dense: add is of shape \(4, 7\)"):
        so.layer_norm_dense(x, gamma, kernel, add=jnp.ones((4, 7)))
    with pytest.raises(TypeError, match=r"layer_norm: add is of dtype bfloat16; expected float32"):
        so.layer_norm_mlp(x, gamma, (kernel, kernel), add=jnp.ones((4, 8), jnp.bfloat16))
    with pytest.raises(TypeError, match="layer_norm_dense: return_input is a str"):
        so.layer_norm_dense(x, gamma, kernel, return_input="yes")
