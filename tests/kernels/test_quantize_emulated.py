"""The quantising kernels on the host, from the source that NVRTC compiles: the reference's bits."""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from shardops.kernels.launch import Launch
from shardops.kernels.quantize_plan import (
    QuantizeProblem,
    arranged,
    magnitudes_plan,
    quantize_plan,
    tiling,
)
from shardops.kernels.target import target_for
from tests.kernels import emulator
from tests.kernels.norm_problems import DTYPES
from tests.kernels.quantize_problems import LAYOUTS, MODES, blanks, draw, in_order, same, wanted

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)
TARGET = target_for("sm_90", 132)
FORMATS = ("float8_e4m3fn", "float8_e5m2")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def run(launch: Launch, built, operands, like, scalars):
    results = blanks(launch, like)
    emulator.run(launch, built, operands, results, scalars)
    return results


# entries, groups, rows, cols: whole tiles; two that are cut; groups that cut blocks; odd columns.
SHAPES = ((1, 1, 128, 256), (2, 1, 160, 200), (1, 3, 40, 72), (1, 2, 130, 33))
CASES = [
    (scales, layout, SHAPES[n % 4], tuple(DTYPES)[n % 3], FORMATS[n // 2 % 2])
    for n, (scales, layout) in enumerate(itertools.product(MODES, LAYOUTS))
] + [("row32", (True, True), SHAPES[3], "float32", "float8_e5m2")]


@pytest.mark.parametrize("scales, layout, shape, x, format", CASES)
def test_bits_are_those_of_the_reference(scales, layout, shape, x, format, built, rng):
    problem = QuantizeProblem(*shape, x, format, scales, *layout, amax=scales == "tensor")
    values = draw(rng, problem)
    scale_inv = np.float32([0.37, 2.0**-20])[: shape[0]]
    want = wanted(problem, values, scale_inv)
    laid = arranged(problem, TARGET)
    operands = [values, scale_inv] if scales == "tensor" else [values]
    got = run(quantize_plan(laid, TARGET), built, operands, want, [laid.shape(tiling(laid))])
    for one, other in zip(in_order(laid, got), want, strict=True):
        assert same(np.ascontiguousarray(one), other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 200, 384), (1, 2, 130, 33), (1, 3, 256, 136)])
def test_scales_of_128_lie_as_cublaslt_reads_them(layout, shape, built, rng):
    problem = QuantizeProblem(*shape, "bfloat16", FORMATS[0], "row128", *layout)
    laid = arranged(problem, TARGET)
    assert laid.blocks_first
    assert (laid.rows, laid.cols) != (200 * 3, 128)
    values = draw(rng, problem)
    want = wanted(problem, values, np.float32([1]))
    got = run(quantize_plan(laid, TARGET), built, [values], want, [laid.shape(tiling(laid))])
    for one, other in zip(in_order(laid, got), want, strict=True):
        assert same(np.ascontiguousarray(one), other)
    few = replace(problem, rows=shape[2] // 4)
    assert not arranged(replace(few, groups=1), TARGET).blocks_first
    assert not arranged(replace(problem, entries=2), TARGET).blocks_first


def test_columns_of_mxfp8_have_scales_by_blocks_unless_products_read_rows(built, rng):
    """Two scales leave as a word, of whole tiles and of one that is cut."""
    problem = QuantizeProblem(1, 1, 200, 216, "bfloat16", FORMATS[0], "row32", as_columns=True)
    laid = arranged(problem, TARGET)
    assert laid.blocks_first
    assert not arranged(replace(problem, as_columns=False), TARGET).blocks_first
    assert not arranged(problem, target_for("sm_100", 148)).blocks_first
    values = draw(rng, problem)
    want = wanted(problem, values, np.float32([1]))
    got = run(quantize_plan(laid, TARGET), built, [values], want, [laid.shape(tiling(laid))])
    for one, other in zip(in_order(laid, got), want, strict=True):
        assert same(np.ascontiguousarray(one), other)


@pytest.mark.parametrize(
    "scales, x, lines",
    [
        ("square", "bfloat16", 1),
        *itertools.product(("row128", "row32"), ("bfloat16", "float16"), [2]),
    ],
)
def test_lines_that_do_not_lie_on_16_bytes(scales, x, lines, built, rng):
    """At once, and by halves: of both layouts of blocks."""
    problem = QuantizeProblem(1, 1, 264, 72, x, FORMATS[1], scales, lines == 2, as_columns=True)
    laid = arranged(problem, TARGET)
    plan = quantize_plan(laid, TARGET)
    assert dict(plan.kernel.constants)["LINES"] == lines
    assert laid.rows % 16 == 8
    values = draw(rng, problem)
    want = wanted(problem, values, np.float32([1]))
    got = run(plan, built, [values], want, [laid.shape(tiling(laid))])
    for one, other in zip(in_order(laid, got), want, strict=True):
        assert same(np.ascontiguousarray(one), other)


def test_rows_of_one_scale_are_one_stream(built, rng):
    """Rows alone are cut anew; from the end, where x was read before."""
    problem = QuantizeProblem(2, 3, 16, 24, "bfloat16", FORMATS[0], "tensor", again=True)
    laid = arranged(problem, TARGET)
    assert (laid.groups, laid.rows, laid.cols) == (1, 9, 128)
    values, scale_inv = draw(rng, problem), np.float32([0.25, 3.0])
    want = wanted(problem, values, scale_inv)
    got = run(
        quantize_plan(laid, TARGET), built, [values, scale_inv], want, [laid.shape(tiling(laid))]
    )
    assert same(got[0], want[0])


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("count", [5, 8192, 8195])
@pytest.mark.parametrize("odd", [True, False])
def test_magnitudes(x, count, odd, built, rng):
    """All of an entry's elements count, and of the finite ones there is a maximum of its own."""
    values = rng.standard_normal((3, count)).astype(np.float32)
    values[0, -1], values[1, 0], values[2] = 77.0, -99.0, 1e-41
    if odd:
        values[0, 2], values[1, 3] = np.nan, -np.inf
    values = values.astype(DTYPES[x])
    launch, parts = magnitudes_plan(3, count, x, target_for("sm_90", 2))
    like = [np.zeros((3, 2), np.float32)]
    (got,) = run(launch, built, [values], like, [np.int64(count), np.int32(parts)])
    wide = np.abs(values.astype(np.float32))
    finite = np.where(np.isfinite(wide), wide, 0).max(1)
    np.testing.assert_array_equal(got, np.stack([wide.max(1), finite], 1))


@pytest.mark.parametrize("format", FORMATS)
def test_conversion_rounds_as_ml_dtypes(format, built):
    """Each representable number, the midpoints between two, and their neighbours in float32."""
    dtype = ml_dtypes.float8_e4m3fn if format == FORMATS[0] else ml_dtypes.float8_e5m2
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    top = float(ml_dtypes.finfo(dtype).max)
    known = np.unique(codes[np.isfinite(codes)])
    middle = (known[1:] + known[:-1]) / 2
    every = np.concatenate([known, middle])
    ends = np.float32([np.inf, -np.inf])
    beside = [np.nextafter(every, end) for end in ends]
    every = np.concatenate([every, *beside, ends, [np.nan]])
    x = np.zeros((1, 1, -(-every.size // 128), 128), np.float32)
    x.reshape(-1)[: every.size] = every
    problem = arranged(QuantizeProblem(*x.shape, "float32", format, "tensor"), TARGET)
    want = [np.clip(x, -top, top).astype(dtype)]
    operands = [x, np.ones(1, np.float32)]
    got = run(
        quantize_plan(problem, TARGET), built, operands, want, [problem.shape(tiling(problem))]
    )
    # float32's own subnormals, the neighbours of 0, are 0.
    assert same(got[0], want[0])
