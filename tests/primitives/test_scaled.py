"""The reference quantiser and `dequantize`: bits against numpy, and bounds of the error."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardops.primitives.scaled import (
    ScaledArray,
    ScalingMode,
    quantize_reference,
    tensor_scale_inv,
)
from shardops.rules.scales import scale_shape
from tests import cases

# fmax, its exponent, half a step relative to a normal value, half a step of subnormal values
FORMATS = {
    "float8_e4m3fn": (448.0, 8, 2.0**-4, 2.0**-10),
    "float8_e5m2": (57344.0, 15, 2.0**-3, 2.0**-17),
}
DELAYED, CURRENT = ScalingMode.TENSOR_DELAYED, ScalingMode.TENSOR_CURRENT
BLOCK, MX = ScalingMode.BLOCK_128, ScalingMode.MXFP8

CALLS = [
    (CURRENT, None, (6, 64)),
    (CURRENT, None, ()),
    (BLOCK, (1, 128), (4, 256)),
    (BLOCK, (128, 1), (256, 3)),
    (BLOCK, (128, 128), (256, 384)),
    (BLOCK, (1, 1, 128), (2, 3, 128)),
    (MX, (1, 32), (4, 96)),
    (MX, (32, 1), (64, 5)),
    (MX, (32,), (64,)),
    # lengths that break a block
    (BLOCK, (1, 128), (3, 1376)),
    (BLOCK, (128, 128), (33, 1376)),
    (BLOCK, (1, 128), (3, 48)),
    (MX, (1, 32), (3, 1376)),
    (MX, (1, 32), (3, 48)),
    (MX, (1, 32), (3, 33)),
    (MX, (32, 1), (33, 3)),
    (MX, (1, 32), (3, 1)),
]

every_call = pytest.mark.parametrize("mode, block, shape", CALLS, ids=str)
every_format = pytest.mark.parametrize("fmt", FORMATS)


def quantize(x, mode, block, fmt="float8_e4m3fn", **more):
    return jax.jit(lambda x: quantize_reference(x, mode, block, fmt, **more))(x)


def wide_range(rng, shape, dtype="float32"):
    """Magnitudes over many octaves: some blocks' scales differ, some elements are subnormal."""
    return (rng.standard_normal(shape) * np.exp2(rng.uniform(-20, 12, shape))).astype(
        cases.DTYPES[dtype]
    )


def blocks_of(shape, block):
    """Where each scale lies, and the elements that it covers."""
    block = shape if block is None else block
    counts = [range(-(-n // b)) for n, b in zip(shape, block, strict=True)]
    for at in itertools.product(*counts):
        yield at, tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))


def oracle(x, mode, block, fmt):
    """data and scales as float64, block by block."""
    fmax, emax, *_ = FORMATS[fmt]
    wide, kind = np.asarray(x).astype(np.float32), getattr(ml_dtypes, fmt)
    data, scales = np.zeros(x.shape, kind), np.zeros(scale_shape(x.shape, block))
    for at, where in blocks_of(x.shape, block):
        amax = np.abs(wide[where]).max(initial=0)
        if mode is MX:
            scale = 2.0 ** max(math.floor(math.log2(amax)) - emax, -126) if amax else 2.0**-126
            scaled = wide[where].astype(np.float64) / scale
        else:
            scale = amax * (np.float32(1) / np.float32(fmax)) if amax else np.float32(1)
            scaled = wide[where] * (np.float32(1) / scale)
        scales[at if block else ()] = scale
        data[where] = np.clip(scaled, -fmax, fmax).astype(np.float32).astype(kind)
    return data.astype(np.float64), scales


def values(scales):
    """Scales as float64; a cast of 2^-127 to float32 is flushed to 0 on some devices."""
    return np.asarray(scales).astype(np.float64)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cases.DTYPES)
@every_format
@every_call
def test_quantize_gives_the_bits_of_the_rule(rng, mode, block, shape, fmt, dtype):
    x = wide_range(rng, shape, dtype)
    got = quantize(x, mode, block, fmt)
    data, scales = oracle(x, mode, block, fmt)
    np.testing.assert_array_equal(np.asarray(got.data).astype(np.float64), data)
    np.testing.assert_array_equal(values(got.scale_inv), scales)
    assert got.scale_inv is not None
    assert got.scale_inv.dtype == (jnp.float8_e8m0fnu if mode is MX else jnp.float32)
    assert (got.data.dtype, got.dtype) == (jnp.dtype(fmt), cases.DTYPES[dtype])
    assert (got.shape, got.ndim, got.block) == (shape, len(shape), block)
    if block is None:
        assert got.amax == np.abs(x).max()
        assert got.amax.dtype == jnp.float32
    else:
        assert got.amax is None


@every_format
@every_call
def test_quantize_round_trip(rng, mode, block, shape, fmt):
    """Off by half a step of the format, and MXFP8 by what is above fmax: under an eighth."""
    fmax, _, relative, subnormal = FORMATS[fmt]
    x = wide_range(rng, shape)
    got = quantize(x, mode, block, fmt)
    back = np.asarray(jax.jit(lambda q: q.dequantize())(got)).astype(np.float64)
    for at, where in blocks_of(shape, block):
        scale = values(got.scale_inv)[at if block else ()]
        one = x[where].astype(np.float64)
        limit = np.maximum(relative * np.abs(one), subnormal * scale)
        limit = np.where(np.abs(one) > fmax * scale, np.abs(one) / 8, limit) * (1 + 1e-6)
        assert (np.abs(back[where] - one) <= limit).all()
        if mode is not MX:
            assert np.abs(one).max() <= fmax * scale * (1 + 1e-6)


@every_format
def test_mxfp8_scales_follow_the_rule_of_the_format(fmt):
    """2^(floor(log2(amax)) - emax): just under a power of two, at it, and just above."""
    _, emax, *_ = FORMATS[fmt]
    exponents = np.arange(-126, 128)
    below = np.nextafter(np.exp2(exponents).astype(np.float32), np.float32(0))
    at = np.exp2(exponents).astype(np.float32)
    above = np.nextafter(at, np.float32(np.inf))
    for amax, want in ((below[1:], exponents[:-1]), (at, exponents), (above, exponents)):
        x = np.zeros((amax.size, 32), np.float32)
        x[:, 7] = amax
        scales = quantize(x, MX, (1, 32), fmt).scale_inv
        np.testing.assert_array_equal(
            values(scales)[:, 0], np.exp2(np.maximum(want - emax, -126).astype(np.float64))
        )


@every_format
@pytest.mark.parametrize(
    "mode, block", [(CURRENT, None), (BLOCK, (1, 128)), (MX, (1, 32))], ids=str
)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39, 1.2e-38, 1e-30, 3.4e38, np.inf, np.nan])
def test_quantize_scale_is_finite_for_any_amax(value, mode, block, fmt):
    """And what is dequantised is NaN only where the element was."""
    fmax, *_ = FORMATS[fmt]
    x = np.zeros((2, 128), np.float32)
    x[0, 3], x[0, 5] = value, -value
    got = quantize(x, mode, block, fmt)
    scales = values(got.scale_inv)
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    back = np.asarray(got.dequantize())
    np.testing.assert_array_equal(np.isnan(back), np.isnan(x))
    data = np.asarray(got.data).astype(np.float64)
    if value == np.inf:
        np.testing.assert_array_equal(data[0, [3, 5]], [fmax, -fmax])
    if 1e-30 <= value < np.inf:
        np.testing.assert_allclose(back[0, [3, 5]], [value, -value], rtol=0.13)
    assert not np.delete(back[0], [3, 5]).any()


@pytest.mark.parametrize(
    "mode, block", [(CURRENT, None), (BLOCK, (1, 128)), (MX, (1, 32))], ids=str
)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_quantize_scale_ignores_values_that_are_not_finite(rng, value, mode, block):
    """The others keep the bits that they have without them; amax tells of them."""
    x = wide_range(rng, (4, 128))
    x[1, 3] = 0.0
    want = quantize(x, mode, block)
    x[1, 3] = value
    got = quantize(x, mode, block)
    np.testing.assert_array_equal(values(got.scale_inv), values(want.scale_inv))
    same = np.ones(x.shape, bool)
    same[1, 3] = False
    for one, other in ((got.data, want.data), (got.dequantize(), want.dequantize())):
        np.testing.assert_array_equal(
            np.asarray(one).astype(np.float32)[same], np.asarray(other).astype(np.float32)[same]
        )
    if mode is CURRENT:
        assert got.amax is not None
        assert not np.isfinite(got.amax)


@every_format
def test_quantize_delayed_saturates(fmt):
    """A scale of 1 from steps before; 500 and -1e4 are beyond e4m3, the amax is that of now."""
    fmax, *_ = FORMATS[fmt]
    x = np.array([500, -1e4, 1e5, -np.inf, 1, np.nan], np.float32)
    got = quantize(x, DELAYED, None, fmt, scale_inv=jnp.float32(1))
    data = np.asarray(got.data).astype(np.float32)
    step = {448.0: 0, 57344.0: 600}[fmax]
    np.testing.assert_allclose(data[:5], np.clip(x[:5], -fmax, fmax), atol=step)
    assert np.isnan(data[5])
    assert got.amax is not None
    assert np.isnan(got.amax)
    finite = quantize(x[:3], DELAYED, None, fmt, scale_inv=np.float32(0.5))
    assert (float(finite.amax or 0), float(finite.scale_inv or 0)) == (1e5, 0.5)


@every_format
def test_tensor_scale_inv(fmt):
    fmax, *_ = FORMATS[fmt]
    amax = np.array([0, 1e-45, 1e-39, 2.0**-126, 1.0, fmax, 3.4e38], np.float32)
    tiny = np.finfo(np.float32).tiny
    got = np.asarray(jax.jit(lambda a: tensor_scale_inv(a, fmt))(amax))
    unit = np.float32(1) / np.float32(fmax)
    want = [1, 1, 1, tiny, unit, np.float32(fmax) * unit, amax[-1] * unit]
    np.testing.assert_array_equal(got, np.array(want, np.float32))


def test_dequantize_every_mxfp8_scale():
    """Every code of e8m0, from 2^-127 (subnormal in float32) to 2^127, and NaN."""
    codes = np.arange(256, dtype=np.uint8)
    data = np.tile(np.array([[1, -1.5, 448, 0]], np.float32), (256, 8))
    scaled = ScaledArray(
        jnp.asarray(data).astype(jnp.float8_e4m3fn),
        jnp.asarray(codes.view(ml_dtypes.float8_e8m0fnu)[:, None]),
        None,
        MX,
        jnp.float32,
        (1, 32),
    )
    got = np.asarray(jax.jit(lambda q: q.dequantize())(scaled))
    with np.errstate(over="ignore"):
        want = (data * np.exp2(np.arange(256.0) - 127)[:, None]).astype(np.float32)
    want[255] = np.nan
    normal = (np.abs(want) >= np.finfo(np.float32).tiny) | (want == 0) | np.isnan(want)
    np.testing.assert_array_equal(got[normal], want[normal])
    np.testing.assert_allclose(got, want, rtol=0, atol=np.finfo(np.float32).tiny)


def test_dequantize_rounds_once(rng):
    """scale times data in float32, then the dtype asked for, or that which it stands for."""
    scaled = quantize(wide_range(rng, (4, 64), "bfloat16"), CURRENT, None)
    assert scaled.dequantize().dtype == jnp.bfloat16
    wide = scaled.dequantize(jnp.float32)
    for dtype in cases.DTYPES.values():
        np.testing.assert_array_equal(
            np.asarray(scaled.dequantize(dtype)), np.asarray(wide).astype(dtype)
        )


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_quantize_none_is_the_array(rng, dtype):
    x = cases.random(rng, (3, 5), dtype)
    got = quantize(x, ScalingMode.NONE, None)
    assert jax.tree.structure(got).num_leaves == 1
    np.testing.assert_array_equal(np.asarray(got.dequantize()), x)
    assert got.dequantize(jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize(
    "mode, block", [(CURRENT, None), (BLOCK, (1, 128)), (MX, (1, 32))], ids=str
)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_quantize_nothing(mode, block, shape):
    got = quantize(np.zeros(shape, np.float32), mode, block)
    assert got.shape == got.dequantize().shape == shape
    assert np.isfinite(values(got.scale_inv)).all()
