"""Which way a product of quantised operands goes, and that the ways around FP8 lose nothing."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardops as so
from shardops.kernels.gemm_scaled_plan import ScaleMode, Side, scaled_plan
from shardops.primitives.gemm_scaled_local import Scaled, in_bfloat16

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
NOTHING = ((), ())
ALONG = ((1,), (1,))


def side(shape, kind="tensor", block=None, dtype=E4M3):
    return Side(shape, dtype, kind, block)


def plan(lhs, rhs, contracting=ALONG, batch=NOTHING, arch="sm_90"):
    return scaled_plan(lhs, rhs, contracting, batch, arch)


TENSOR = side((48, 64))
ROWS = side((48, 256), "block_128", (1, 128))
TILES = side((48, 256), "block_128", (128, 128))


def mx(*shape):
    return side(shape, "mxfp8", (1, 32))


MX = mx(48, 256)
LONG, LONGER = mx(48, 2**17), mx(48, 2**18)
PLAIN = side((48, 64), "none", dtype="bfloat16")
WIDE = side((48, 64), "none", dtype="float32")


@pytest.mark.parametrize(
    "lhs, rhs, arch, route, why",
    [
        (TENSOR, TENSOR, "sm_90", "fp8", "FP8 tensor cores, one scale"),
        (TENSOR, TENSOR, "sm_89", "fp8", "FP8 tensor cores, one scale"),
        (TENSOR, TENSOR, "sm_100", "fp8", "FP8 tensor cores, one scale"),
        (TENSOR, TENSOR, "sm_80", "bfloat16", "sm_80 has no FP8 tensor cores"),
        (TENSOR, PLAIN, "sm_90", "bfloat16", "rhs is not quantised"),
        (WIDE, TENSOR, "sm_90", "float32", "lhs is not quantised, so in float32"),
        (ROWS, TILES, "sm_90", "fp8", "FP8 tensor cores, scales of 128 elements"),
        (ROWS, TILES, "sm_100", "float32", "on sm_90 alone"),
        (TILES, TILES, "sm_90", "float32", "128 x 128 blocks of one operand only"),
        (MX, MX, "sm_90", "bfloat16", "sm_90 has no MXFP8 tensor cores"),
        (MX, MX, "sm_100", "fp8", "FP8 tensor cores, MXFP8 scales"),
        (MX, ROWS, "sm_100", "float32", "lhs has MXFP8 scales, rhs has scales of 128"),
        (side((8, 64), dtype=E5M2), side((8, 64), dtype=E5M2), "sm_90", "bfloat16", "no E5M2 by"),
        (MX, mx(2**31, 256), "sm_100", "bfloat16", "rhs has too many scales: 2147483648 x 8"),
        (
            mx(2**30, 2**18),
            LONGER,
            "sm_100",
            "bfloat16",
            "lhs has too many scales: 1073741824 x 8192",
        ),
        (mx(2**30, 2**17), LONG, "sm_100", "fp8", "MXFP8 scales"),
    ],
)
def test_route(lhs, rhs, arch, route, why):
    found = plan(lhs, rhs, arch=arch)
    assert (found.route, why in found.why) == (route, True), found


def test_what_is_moved_and_padded_is_said():
    found = plan(side((48, 60)), side((60, 20)), ((1,), (0,)))
    assert found.why == (
        "FP8 tensor cores, one scale; the 8-bit data of rhs are transposed first; "
        "n is padded from 20 to 32; k is padded from 60 to 64"
    )
    assert found.native is not None
    assert (found.native.m, found.native.n, found.native.k) == (48, 32, 64)
    assert found.native.result == (48, 20)


def test_k_runs_along_the_blocks():
    """Of two contracted dims, the one with blocks is the last, whatever the order in the call."""
    lhs = side((48, 256, 6), "block_128", (1, 128, 1))
    rhs = side((6, 32, 256), "block_128", (1, 128, 128))
    native = plan(lhs, rhs, ((1, 2), (2, 0))).native
    assert native is not None
    assert (native.lhs.order, native.rhs.order) == ((0, 2, 1), (1, 0, 2))
    assert (native.lhs.scale, native.rhs.scale) == (ScaleMode.VEC_128, ScaleMode.BLOCK_128)


@pytest.mark.parametrize(
    "lhs, rhs, contracting, batch, why",
    [
        (side((8, 6, 130), "block_128", (1, 1, 128)),) * 2 + (((1, 2), (1, 2)), NOTHING, "over"),
        (ROWS, side((48, 256), "block_128", (128, 1)), ALONG, NOTHING, "not lie along one contra"),
        (side((3, 8, 128), "block_128", (1, 1, 128)),) * 2 + (((2,), (2,)), ((0,), (0,)), "batch"),
        (
            side((4, 130, 128), "block_128", (1, 128, 128)),
            side((48, 128), "block_128", (1, 128)),
            ((2,), (1,)),
            NOTHING,
            "over the end of its last free dim",
        ),
        (
            side((130, 4, 128), "block_128", (128, 1, 128)),
            side((48, 128), "block_128", (1, 128)),
            ((2,), (1,)),
            NOTHING,
            "do not lie along its last free dim",
        ),
    ],
)
def test_blocks_that_the_library_cannot_read(lhs, rhs, contracting, batch, why):
    found = plan(lhs, rhs, contracting, batch)
    assert (found.route, why in found.why) == ("float32", True), found.why


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_every_mxfp8_value_is_exact_in_bfloat16(fmt):
    """Each number of the format with each power of two, but for those that bfloat16 holds as a
    subnormal or not at all: these are below 2^-126, or from 2^128 on, which no float32 is."""
    with np.errstate(invalid="ignore"):
        numbers = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, fmt))
        values = numbers.astype(np.float64)
    finite = np.isfinite(values)
    exponents = np.arange(255)
    exact = values[finite] * np.exp2(exponents - 127.0)[:, None]
    data = np.repeat(np.tile(numbers[finite], (255, 1))[:, :, None], 32, 2).reshape(255, -1)
    scales = exponents.astype(np.uint8)[:, None].repeat(finite.sum(), 1)
    static = Scaled(so.ScalingMode.MXFP8, jnp.dtype(jnp.float32), (1, 32))
    got = in_bfloat16(
        static, (jnp.asarray(data), jnp.asarray(scales.view(ml_dtypes.float8_e8m0fnu)))
    )
    assert got.dtype == jnp.bfloat16
    got = np.asarray(got)[:, ::32].astype(np.float64)
    held = (exact == 0) | ((np.abs(exact) >= 2.0**-126) & (np.abs(exact) < 2.0**128))
    np.testing.assert_array_equal(got[held], exact[held])
    assert held[exponents == 127].all()
    small = np.abs(exact) < 2.0**-126
    assert (np.abs(got - exact)[small] < 2.0**-126).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_every_number_of_8_bits_is_exact_in_bfloat16(fmt):
    """So a product with one scale a tensor needs no dequantised array: the scale comes last."""
    numbers = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, fmt))
    static = Scaled(so.ScalingMode.TENSOR_CURRENT, jnp.dtype(jnp.float32), None)
    got = np.asarray(in_bfloat16(static, (jnp.asarray(numbers), jnp.float32(0.3))))
    np.testing.assert_array_equal(got.astype(np.float64), numbers.astype(np.float64))
