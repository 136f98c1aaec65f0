"""`so.quantize` on one device: bits of the reference, bounds of the format, odd values, layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.primitives.scaling import tensor_scale_inv
from tests import cases
from tests.quantize.quantisers import (
    FORMATS,
    LAYOUTS,
    RECIPES,
    ROLES,
    bits,
    by_reference,
    float64,
    parts,
    wide_range,
)

each_recipe = pytest.mark.parametrize("name", RECIPES)
SHAPES = [(256, 384), (3, 1376), (2, 3, 160), (1, 1), (0, 64)]


@each_recipe
def test_quantize_gives_the_bits_of_the_reference(rng, name):
    """Every role and shape, layouts and dtypes in turn: whole blocks, broken ones, one element."""
    xs, quantizers = [], []
    for n, shape in enumerate([*SHAPES, *SHAPES[:3]]):
        dtype, layout = (*cases.DTYPES.values(),)[n // 2 % 3], ("both", *LAYOUTS)[n % 4]
        xs.append(wide_range(rng, shape, dtype))
        quantizers.append(RECIPES[name].quantizer(ROLES[n % 3], layout))

    def every(quantize):  # one program for all, which compiles faster than one for each
        return jax.jit(lambda xs, qs: [quantize(*call) for call in zip(xs, qs, strict=True)])(
            xs, quantizers
        )

    for x, quantizer, got, want in zip(
        xs, quantizers, every(so.quantize), every(by_reference), strict=True
    ):
        got, what = got.detach(), (quantizer.layout, x.shape, x.dtype)
        assert jax.tree.structure(got) == jax.tree.structure(want), what
        assert bits(got) == bits(want), what
        assert (got.shape, got.ndim, got.dtype) == (x.shape, x.ndim, x.dtype)


@each_recipe
def test_quantize_eagerly_gives_the_same_bits(rng, name):
    x = jnp.asarray(wide_range(rng, (5, 160), np.float32))
    quantizer = RECIPES[name].quantizer("input", "both")
    assert bits(so.quantize(x, quantizer)) == bits(jax.jit(so.quantize)(x, quantizer))


@each_recipe
@pytest.mark.parametrize("role", ["input", "gradient"])
def test_dequantized_is_within_half_a_step(rng, name, role):
    """Against x in float64; MXFP8 loses up to an eighth of what is above fmax."""
    quantizer = RECIPES[name].quantizer(role, "both")
    relative, subnormal, fmax = FORMATS[quantizer.format]
    x = wide_range(rng, (256, 384))
    if name == "delayed":
        quantizer = quantizer.update(jnp.max(jnp.abs(x)))
    scaled = so.quantize(jnp.asarray(x), quantizer)
    for part, want in zip(parts(scaled), (x, x.T), strict=True):
        want, got = float64(want), float64(part.dequantize())
        scales = float64(part.scale_inv)
        if part.block is not None:
            for axis, b in enumerate(part.block):
                scales = np.repeat(scales, b, axis)[tuple(map(slice, want.shape))]
        limit = np.maximum(relative * np.abs(want), subnormal * scales)
        above = np.abs(want) > fmax * scales * (1 + 1e-6)
        assert not above.any() or name == "mxfp8"
        limit = np.where(above, np.abs(want) / 8, limit) * (1 + 1e-6)
        assert (np.abs(got - want) <= limit).all()


@each_recipe
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39, 3.4e38, np.inf, -np.inf, np.nan])
def test_quantize_of_any_value_has_finite_scales(name, value):
    """Infinities saturate, NaN stays, neither counts for a scale; amax tells of both."""
    x = np.zeros((128, 128), np.float32)
    x[3, 5], x[7, 9] = value, 1.0
    for role in ("kernel", "gradient"):
        quantizer = RECIPES[name].quantizer(role, "both")
        fmax = FORMATS[quantizer.format][2]
        scaled = so.quantize(jnp.asarray(x), quantizer)
        for part, at in zip(parts(scaled), ((3, 5), (5, 3)), strict=True):
            scales, data = float64(part.scale_inv), float64(part.data)
            assert np.isfinite(scales).all()
            assert (scales > 0).all()
            assert np.isnan(data).sum() == np.isnan(value)
            if np.isinf(value):
                assert data[at] == np.copysign(fmax, value)
            back = float64(part.dequantize())
            assert np.isfinite(back).sum() == back.size - np.isnan(value)
        if scaled.amax is not None:
            top = np.abs(x).max() if not np.isnan(value) else np.nan
            np.testing.assert_array_equal(np.asarray(scaled.amax), np.float32(top))


def test_quantize_current_scales_by_what_is_finite(rng):
    x = wide_range(rng, (8, 64))
    x[2, 3] = 0
    quantizer = RECIPES["current"].quantizer()
    want = so.quantize(jnp.asarray(x), quantizer)
    for value in (np.inf, np.nan):
        x[2, 3] = value
        got = so.quantize(jnp.asarray(x), quantizer)
        assert bits(got.scale_inv) == bits(want.scale_inv)
        assert not np.isfinite(np.asarray(got.amax))


def test_quantize_delayed_saturates_and_reports_this_step():
    quantizer = RECIPES["delayed"].quantizer()
    x = jnp.asarray([[500, -1e4, 3, np.inf]], jnp.float32)
    scaled = so.quantize(x, quantizer)
    np.testing.assert_array_equal(float64(scaled.data), [[448, -448, 3, 448]])
    assert scaled.amax == np.inf
    assert so.quantize(x[:, :3], quantizer).amax == 1e4
    assert scaled.scale_inv == 1


@each_recipe
def test_columns_are_the_array_turned(rng, name):
    """Of one scale, and of square blocks, the same numbers; others are quantised along rows."""
    x = jnp.asarray(wide_range(rng, (2, 96, 256)))
    for role in ("input", "kernel"):
        both = so.quantize(x, RECIPES[name].quantizer(role, "both"))
        alone = so.quantize(x, RECIPES[name].quantizer(role, "columns"))
        assert alone.data is None
        assert bits(alone.transposed_data) == bits(both.transposed_data)
        assert alone.shape == both.shape == x.shape
        assert both.transposed.shape == (256, 2, 96)
        assert bits(alone.dequantize()) == bits(jnp.moveaxis(both.transposed.dequantize(), 0, -1))
        same = bits(jnp.moveaxis(both.data, -1, 0)) == bits(both.transposed_data)
        assert same == (name in ("delayed", "current") or (name, role) == ("block", "kernel"))
        if both.block is not None:
            upright = alone.upright()
            assert [b for b in upright.block if b > 1] == [b for b in both.block if b > 1]


def test_vectors_and_scalars_have_rows():
    for name in RECIPES:
        quantizer = RECIPES[name].quantizer()
        scaled = so.quantize(jnp.ones(160), quantizer)
        np.testing.assert_array_equal(float64(scaled.dequantize()), 1)
        if quantizer.block is None:
            assert so.quantize(jnp.ones(()), quantizer).dequantize() == 1


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("formats", ["E4M3", "HYBRID"])
def test_formats_of_a_recipe(rng, name, formats):
    """E5M2 for gradients alone, and only where it is not asked otherwise."""
    x = jnp.asarray(wide_range(rng, (4, 64)))
    recipe = dataclasses.replace(RECIPES[name], formats=formats)
    of_gradients = "float8_e5m2" if formats == "HYBRID" else "float8_e4m3fn"
    for role in ROLES:
        want = of_gradients if role == "gradient" else "float8_e4m3fn"
        assert so.quantize(x, recipe.quantizer(role)).data.dtype == jnp.dtype(want)
    assert RECIPES[name].formats == "HYBRID"


def test_current_is_delayed_with_the_scale_of_its_own_amax(rng):
    x = jnp.asarray(wide_range(rng, (16, 48)))
    current = so.quantize(x, RECIPES["current"].quantizer())
    delayed = so.quantize(x, RECIPES["delayed"].quantizer().update(current.amax))
    assert bits(current.data) == bits(delayed.data)
    assert bits(current.scale_inv) == bits(tensor_scale_inv(current.amax))
