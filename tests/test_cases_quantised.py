"""Reported cases 14, 16, 17 and 18, of quantised arrays and their products, and TE's own cases."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import cases, meshes
from tests.closeness import assert_close, assert_shards_close
from tests.kernels.scaled_calls import in_float64
from tests.quantize.quantisers import FORMATS, RECIPES, bits

each_recipe = pytest.mark.parametrize("name", RECIPES)


def quantised(name, role="input", layout="rows"):
    quantizer = RECIPES[name].quantizer(role, layout)
    return lambda x: so.quantize(x, quantizer).detach()


# --- 14: magnitudes of nothing, and of too much ---------------------------------------------------


@each_recipe
@pytest.mark.parametrize("value", [0.0, 1e-39, 1e-30])
def test_case_14_nothing_and_hardly_anything_have_a_finite_scale(name, value):
    """And a product of them is finite: 0 for zeros."""
    x = jax.jit(quantised(name))(jnp.full((4, 128), value))
    w = jax.jit(quantised(name, "kernel"))(jnp.ones((128, 32)))
    scale = np.asarray(x.scale_inv).astype(np.float64)
    assert np.isfinite(scale).all()
    assert (scale >= 2.0**-126).all()
    out = np.asarray(jax.jit(so.gemm)(x, w))
    assert np.isfinite(out).all()
    assert value > 1e-38 or not out.any()


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_case_14_a_step_of_infinity_keeps_the_scale(name):
    quantizer = so.recipes.DelayedScaling(amax_history_len=2).quantizer()
    quantizer = quantizer.update(jnp.float32(3))
    scaled = jax.jit(so.quantize)(jnp.asarray([1.0, np.inf]), quantizer)
    assert np.isinf(np.asarray(scaled.amax))
    assert quantizer.update(scaled.amax) == quantizer
    current = jax.jit(quantised("current"))(jnp.asarray([[1.0, np.inf]]))
    assert np.isfinite(np.asarray(current.scale_inv))


@pytest.mark.parametrize("format", FORMATS)
def test_case_14_values_saturate(format):
    """The scale is 1, and 464 is where a bare cast of E4M3 begins to give NaN."""
    quantizer = dataclasses.replace(so.recipes.DelayedScaling().quantizer(), format=format)
    x = jnp.asarray([500.0, -1e4, 464.1, 1e6, -np.inf, np.nan])
    got = np.asarray(so.quantize(x, quantizer).dequantize())
    top = FORMATS[format][2]
    want = np.clip(np.asarray(x), -top, top)
    assert np.isnan(got[-1])
    np.testing.assert_allclose(got[:-1], want[:-1], rtol=2 * FORMATS[format][0])
    assert abs(got).max(initial=0, where=~np.isnan(got)) == top


# --- 16: scales lie as their data -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@each_recipe
def test_case_16_a_sharded_contracting_dim_costs_one_sum(rng, name, kind):
    """Both operands lie along it: no data, no scales move, where the sum is no more than these."""
    x, w = cases.random(rng, (128, 256)), cases.random(rng, (256, 128))
    a, b = jax.jit(quantised(name))(x), jax.jit(quantised(name, "kernel"))(w)
    with meshes.entered(kind, {"tp": 2}) as mesh:

        def f(x, w):
            a, b = quantised(name)(x), quantised(name, "kernel")(w)
            return so.gemm(a, b, out_sharding=P(), out_dtype="bfloat16")

        operands = meshes.place(mesh, x, None, "tp"), meshes.place(mesh, w, "tp")
        program = jax.jit(f).lower(*operands).compile()
        sums = [c for c in hlo.collectives(program) if c.bytes > 16]
        assert [(c.kind, c.shape) for c in sums] == [("all-reduce", (128, 128))]
        assert {c.kind for c in hlo.collectives(program)} == {"all-reduce"}
        assert_shards_close(program(*operands), in_float64(a) @ in_float64(b), reduced=256)


# --- 17: shards that are no whole blocks ----------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("m, k, n, axes", [(33, 256, 40, 2), (16, 1376, 24, 8), (16, 96, 48, 2)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_case_17_sizes_that_break_blocks_are_exact(rng, name, m, k, n, axes, kind):
    """1376 over 8 devices are 172 elements, 96 over 2 are 48: never a wrong value."""
    x, w = cases.random(rng, (m, k)), cases.random(rng, (k, n))
    a, b = jax.jit(quantised(name))(x), jax.jit(quantised(name, "kernel"))(w)
    with meshes.entered(kind, {"tp": axes}) as mesh:
        got = jax.jit(lambda x, w: so.gemm(quantised(name)(x), quantised(name, "kernel")(w)))(
            meshes.place(mesh, x, None, "tp"), meshes.place(mesh, w, "tp")
        )
        assert_shards_close(got, in_float64(a) @ in_float64(b), reduced=k)


@each_recipe
def test_case_17_sizes_of_0_and_1(rng, name):
    sizes = [*itertools.product((0, 1), repeat=3), (1, 3, 0), (3, 1, 2), (2, 33, 1)]
    operands = [(cases.random(rng, (m, k)), cases.random(rng, (k, n))) for m, k, n in sizes]

    @jax.jit
    def every(operands):
        pairs = [(quantised(name)(x), quantised(name, "kernel")(w)) for x, w in operands]
        return pairs, [so.gemm(a, b) for a, b in pairs]

    for (a, b), out in zip(*every(operands), strict=True):
        assert_close(out, in_float64(a) @ in_float64(b), reduced=33)


# --- 18: one scale, however many devices ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_case_18_an_outlier_of_one_shard_counts_everywhere(rng, name, kind):
    """Bits of one device on 2 and 8, those of a product without a sum too."""
    x, w = cases.random(rng, (64, 128)), cases.random(rng, (128, 48))
    x[0, 0] = 100

    def f(x, w):
        scaled = so.quantize(x, RECIPES[name].quantizer())
        return scaled.detach(), so.gemm(scaled, quantised(name, "kernel")(w))

    want, product = jax.jit(f)(x, w)
    for devices in (2, 8):
        with meshes.entered(kind, {"dp": devices}) as mesh:
            operands = meshes.place(mesh, x, "dp"), meshes.place(mesh, w)
            program = jax.jit(f).lower(*operands).compile()
            got, out = program(*operands)
        assert bits(got) == bits(want)
        assert_shards_close(out, np.asarray(product), reduced=1)
        found = hlo.collectives(program)
        assert {c.kind for c in found} == {"all-reduce"}
        assert max(c.bytes for c in found) <= 8


# --- the cases of TransformerEngine's own tests ---------------------------------------------------


@each_recipe
@pytest.mark.parametrize("m, n, k", [(64, 32, 64), (64, 128, 128)])
def test_dense_in_every_layout_forward_and_backward(rng, name, m, n, k):
    """NN, NT, TN and TT: values, and both cotangents by the values that were multiplied."""

    def every(operands, cotangent):
        results = []
        for (x, w), dims in zip(operands, DIMS, strict=True):

            def f(x, w, dims=dims):
                of = RECIPES[name].quantizer
                scaled = so.quantize(x, of("input")), so.quantize(w, of("kernel"))
                return so.gemm(*scaled, contracting_dims=dims), [s.detach() for s in scaled]

            out, pull, scaled = jax.vjp(f, x, w, has_aux=True)
            results.append((out, pull(cotangent), scaled))
        return results

    x, w, dz = cases.random(rng, (m, k)), cases.random(rng, (k, n)), cases.random(rng, (m, n))
    operands = [(x if a == 1 else x.T, w if b == 0 else w.T) for (a,), (b,) in DIMS]
    for (out, (dx, dw), (a, b)), ((i,), (j,)) in zip(
        jax.jit(every)(operands, dz), DIMS, strict=True
    ):
        lhs, rhs = in_float64(a), in_float64(b)
        lhs, rhs = lhs if i == 1 else lhs.T, rhs if j == 0 else rhs.T
        assert_close(out, lhs @ rhs, reduced=k)
        want = dz @ rhs.T, lhs.T @ dz
        assert_close(dx, want[0] if i == 1 else want[0].T, reduced=n)
        assert_close(dw, want[1] if j == 0 else want[1].T, reduced=m)


DIMS = [((i,), (j,)) for i in (1, 0) for j in (0, 1)]


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", [(256, 128), (128, 256)])
def test_norms_are_those_in_float32_quantised(rng, name, op, shape):
    """Of bfloat16 x, with 1 + gamma, and both layouts: bits."""
    x, gamma = cases.random(rng, shape, "bfloat16"), cases.random(rng, shape[1:], "bfloat16")
    quantizer = RECIPES[name].quantizer("input", "both")
    rest = (gamma,) if op == "layer_norm" else ()
    options = {"epsilon": 1e-2, "zero_centered_gamma": True}

    @jax.jit
    def both(x, gamma, *rest):
        function = getattr(so, op)
        wide = function(x.astype(jnp.float32), gamma, *rest, **options)
        fused = function(x, gamma, *rest, quantizer=quantizer, **options)
        return fused.detach(), so.quantize(wide, quantizer).detach()

    fused, apart = both(x, gamma, *rest)
    assert bits(fused) == bits(apart)
