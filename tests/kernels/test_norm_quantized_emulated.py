"""The norms that quantise, on the host from NVRTC's sources: the bits of the reference."""

import numpy as np
import pytest

from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import (
    QuantizedNorm,
    quantized_forward_plan,
    row_geometry,
)
from shardops.kernels.norm_quantized_rows import Rows
from shardops.kernels.norm_quantized_tiles import Tiles
from shardops.kernels.quantize_plan import QuantizeProblem, Tiling, joined
from shardops.kernels.target import target_for
from tests.kernels import emulator
from tests.kernels.norm_problems import DTYPES
from tests.kernels.quantize_problems import blanks, in_order, same, wanted

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


def norm_of(h, gamma, beta, mean, rstd, zero_centered) -> np.ndarray:
    """The kernel's float32 values, in its order: each operation rounded."""
    scale = gamma.astype(np.float32) + np.float32(zero_centered)
    with np.errstate(invalid="ignore"):  # a row with an infinity
        y = (h.astype(np.float32) - mean[:, None]) * rstd[:, None] * scale
        return y if beta is None else y + beta.astype(np.float32)


def run(launch, built, operands, like, scalars):
    results = blanks(launch, like)
    emulator.run(launch, built, operands, results, scalars)
    return results


def check(norm, written, plan, built, rng):
    """A plan's results: h, statistics against float64, and the bits of y given the statistics."""
    shape = (written.entries, written.groups, written.rows, written.cols)

    def random(of, dtype):
        return rng.standard_normal(of).astype(DTYPES[dtype])

    values = random((norm.rows, norm.cols), norm.x)
    values[1], values[2, 3] = 0, np.inf
    values[3] += 300
    vectors = [random(norm.cols, of) for of in (norm.gamma, norm.beta) if of is not None]
    residual = [random(values.shape, norm.x)] if norm.add else []
    h = values
    if norm.add:
        h = (values.astype(np.float32) + residual[0].astype(np.float32)).astype(values.dtype)
    scale_inv = np.float32([0.02, 0.5, 1.0])[: written.entries]
    given = [scale_inv] if written.scales == "tensor" else []
    data = wanted(written, np.zeros(shape, values.dtype), scale_inv)
    found = [h] * norm.add + [np.zeros(norm.rows, np.float32)] * (1 + (norm.kind == "layer"))
    rows = [np.int64(norm.rows), np.int64(norm.rows // written.entries)]
    tile = None if plan.tile is None else joined(written, TARGET).shape(plan.tile)
    scalars = [*(rows if tile is None else [tile]), np.float32(1e-5)]
    if plan.statistics is None:
        operands = [values, *vectors, *residual, *given]
        got = run(plan.main, built, operands, [*data, *found], scalars)
        got, found = got[: len(data)], got[len(data) :]
    else:
        found = run(plan.statistics, built, [values, *residual], found, [*rows, np.float32(1e-5)])
        operands = [found[0] if norm.add else values, *vectors, *given, *found[norm.add :]]
        got = run(plan.main, built, operands, data, scalars)
    rest = iter(found)
    if norm.add:
        assert next(rest).tobytes() == h.tobytes()
    mean = next(rest) if norm.kind == "layer" else np.zeros(norm.rows, np.float32)
    rstd = next(rest)
    wide = h.astype(np.float64)
    with np.errstate(invalid="ignore"):
        centre = wide.mean(1) if norm.kind == "layer" else 0 * wide[:, 0]
        exact = 1 / np.sqrt(((wide - centre[:, None]) ** 2).mean(1) + 1e-5)
    np.testing.assert_allclose(rstd, exact, rtol=3e-6)
    if norm.kind == "layer":
        np.testing.assert_allclose(mean, centre, rtol=1e-5, atol=1e-5)
    beta = None if norm.beta is None else vectors[1]
    y = norm_of(h, vectors[0], beta, mean, rstd, norm.zero_centered)
    if tile is not None:
        got = in_order(joined(written, TARGET), got)
    for one, other in zip(got, wanted(written, y.reshape(shape), scale_inv), strict=True):
        assert same(np.ascontiguousarray(one), other)


# kind, x, gamma, beta, add, zero-centred; entries, groups, rows, cols
ROWS = {
    "rows": (("rms", "bfloat16", "float32", None, False, True), (1, 1, 5, 264)),
    "rows, several warps, add": (
        ("layer", "float16", "float16", "float32", True, False), (2, 1, 3, 1160)),
    "short rows": (("layer", "float32", "bfloat16", "float32", False, False), (3, 1, 7, 24)),
    "odd rows": (("rms", "bfloat16", "bfloat16", None, True, False), (1, 1, 4, 333)),
}  # fmt: skip


@pytest.mark.parametrize("scales", ["tensor", "row128", "row32"])
@pytest.mark.parametrize("case", ROWS)
def test_rows_in_registers(case, scales, built, rng):
    (kind, x, gamma, beta, add, zero), shape = ROWS[case]
    norm = NormProblem(shape[0] * shape[1] * shape[2], shape[3], kind, x, gamma, beta, add, zero)
    format = FORMATS[len(case) % 2]
    written = QuantizeProblem(*shape, x, format, scales, amax=scales == "tensor")
    problem = QuantizedNorm(norm, written)
    geometry = row_geometry(problem)  # none where a block of odd rows lies in no warp: then tiles
    plan = quantized_forward_plan(problem, TARGET, geometry)
    assert (plan.tile is None) == (geometry is not None)
    check(norm, written, plan, built, rng)


# As above, with scales; the launch's shape; on a GPU of two multiprocessors, so that blocks have
# several rows.
IN_TURN = {
    "a few rows a warp": (
        ("layer", "bfloat16", "bfloat16", "float32", False, True), (3, 1, 7, 264), "tensor",
        Rows(16, 8, 1, 2, open=True)),
    "a warp a row": (
        ("rms", "bfloat16", "float32", None, False, True), (1, 1, 19, 1000), "row128",
        Rows(32, 4, 1, 2, open=True)),
    "warps a row": (
        ("layer", "bfloat16", "bfloat16", "bfloat16", False, False), (1, 1, 7, 2880), "row32",
        Rows(96, 1, 1, 3)),
    "many warps": (
        ("layer", "float16", "bfloat16", "float32", False, False), (2, 1, 4, 2560), "row128",
        Rows(160, 1, 1, 2)),
    "cluster": (
        ("layer", "bfloat16", "bfloat16", "bfloat16", False, False), (1, 1, 5, 4232), "tensor",
        Rows(96, 1, 1, 2, cluster=2)),
    "cluster, blocks": (
        ("rms", "float32", "float16", None, False, False), (1, 1, 5, 1164), "row32",
        Rows(64, 1, 1, 2, cluster=2, open=True)),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_TURN)
def test_rows_in_turn(case, built, rng):
    (kind, x, gamma, beta, add, zero), shape, scales, rows = IN_TURN[case]
    norm = NormProblem(shape[0] * shape[1] * shape[2], shape[3], kind, x, gamma, beta, add, zero)
    format = FORMATS[len(case) % 2]
    written = QuantizeProblem(*shape, x, format, scales, amax=scales == "tensor")
    plan = quantized_forward_plan(QuantizedNorm(norm, written), target_for("sm_90", 2), rows)
    assert plan.main.grid[0] < norm.rows
    check(norm, written, plan, built, rng)


BOTH, COLUMNS, ALONE = (True, True), (False, True), (True, False)
# As above; scales, layout; parts down, across, turns, blocks a cluster (0: statistics are given)
TILES = {
    "both, cluster": (
        ("rms", "bfloat16", "bfloat16", None, False, False), (1, 1, 70, 304), "row32", BOTH,
        (2, 3, 3, 2)),
    "both, scales by blocks": (
        ("rms", "bfloat16", "bfloat16", None, False, False), (1, 1, 136, 200), "row32", BOTH,
        (1, 2, 2, 2)),
    "columns, groups": (
        ("layer", "float32", "bfloat16", "float32", False, True), (2, 2, 40, 100), "row32",
        COLUMNS, (2, 1, 1, 2)),
    "blocks of several warps": (
        ("layer", "float16", "float32", None, False, False), (1, 1, 140, 424), "row128", BOTH,
        (4, 4, 4, 2)),
    "odd rows, add": (
        ("layer", "bfloat16", "float16", "bfloat16", True, True), (2, 1, 37, 131), "tensor", BOTH,
        (1, 2, 2, 2)),
    "one block": (
        ("rms", "float32", "float32", None, True, True), (1, 1, 33, 72), "tensor", COLUMNS,
        (2, 2, 1, 1)),
    "squares": (
        ("rms", "float16", "float16", None, False, False), (1, 1, 130, 256), "square", BOTH,
        (4, 2, 1, 2)),
    "squares, rows": (
        ("rms", "bfloat16", "float32", None, False, True), (1, 1, 128, 264), "square", ALONE,
        (8, 2, 1, 2)),
    "rows": (
        ("layer", "bfloat16", "bfloat16", "bfloat16", False, False), (1, 1, 24, 520), "row128",
        ALONE, (1, 3, 1, 2)),
    "statistics first": (
        ("layer", "bfloat16", "bfloat16", "bfloat16", False, False), (1, 1, 130, 264), "row128",
        COLUMNS, (4, 2, 1, 0)),
    "statistics first, add": (
        ("rms", "float16", "bfloat16", None, True, False), (2, 1, 34, 33), "tensor", BOTH,
        (4, 2, 1, 0)),
}  # fmt: skip

ONCE = ("both, cluster", "rows")  # y stays in registers
LINES = ("blocks of several warps", "statistics first")  # columns leave by way of shared memory
# Blocks of a cluster share the work on sums.
SHARES = ("both, cluster", "blocks of several warps", "squares, rows", "rows")


@pytest.mark.parametrize("case", TILES)
def test_tiles(case, built, rng):
    (kind, x, gamma, beta, add, zero), shape, scales, layout, (*tile, turns, cluster) = TILES[case]
    norm = NormProblem(shape[0] * shape[1] * shape[2], shape[3], kind, x, gamma, beta, add, zero)
    format = FORMATS[len(case) % 2]
    written = QuantizeProblem(*shape, x, format, scales, *layout, amax=scales == "tensor")
    lines = case in LINES
    tiling = Tiling(*tile, layout[1], turns)
    tiles = Tiles(tiling, cluster, 1, case in ONCE, lines, case in SHARES)
    plan = quantized_forward_plan(QuantizedNorm(norm, written), TARGET, tiles)
    assert (plan.statistics is None) == (cluster > 0)
    check(norm, written, plan, built, rng)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_wide_norm_is_float32(kind, built, rng):
    norm = NormProblem(5, 264, kind, "bfloat16", "float32", None)
    x = rng.standard_normal((5, 264)).astype(DTYPES["bfloat16"])
    gamma = rng.standard_normal(264).astype(np.float32)
    launch = quantized_forward_plan(QuantizedNorm(norm, None), TARGET).main
    like = [np.zeros((5, 264), np.float32)] + [np.zeros(5, np.float32)] * (1 + (kind == "layer"))
    scalars = [np.int64(5), np.int64(5), np.float32(1e-5)]
    y, *statistics = run(launch, built, [x, gamma], like, scalars)
    mean = statistics[0] if kind == "layer" else np.zeros(5, np.float32)
    np.testing.assert_array_equal(y, norm_of(x, gamma, None, mean, statistics[-1], False))
