"""The norm kernels' own source, run on the host thread by thread, against float64."""

import itertools
import pathlib

import numpy as np
import pytest

from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_ragged import Ragged
from shardops.kernels.norm_registers import Geometry
from shardops.kernels.norm_split import Split
from shardops.kernels.norm_staged import Staged
from shardops.kernels.resident import Resident
from tests import references
from tests.kernels import emulator
from tests.kernels.norm_emulation import (
    EPSILON,
    assert_close,
    backward,
    bound,
    check,
    check_forward,
    forward,
)
from tests.kernels.norm_problems import random_arrays

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)

SPLIT = Split(64, 2)
WIDE = Staged(64, 64, stages=4)
CLUSTER = Staged(64, 64, stages=4, cluster=2)
RAGGED = Staged(64, 32, stages=4, ragged=True)
WIDE_RAGGED = Staged(64, 64, stages=4, ragged=True)
IN_REGISTERS = Ragged(96, 1, turns=2, min_blocks=1)
CLUSTER_RAGGED = Staged(64, 64, stages=4, cluster=2, ragged=True)
RESIDENT = Resident(64, 1, 4, 2, 2)
KINDS_AND_GEOMETRIES = list(itertools.product(["layer", "rms"], [None, SPLIT, WIDE, CLUSTER]))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("emulated")


#        rows, cols, kind, x, gamma, beta, add, zero_centered; offset; geometry
CASES = {
    "scalar vectors, rows share a warp": (
        NormProblem(5, 7, "layer", "bfloat16", "float32", "float16", True, True), 0, None),
    "one column": (NormProblem(300, 1, "rms", "float32", "float16"), 0, None),
    "padded warp, sums meet in shared memory": (
        NormProblem(70, 96, "layer", "float16", "float16", "float32"), 0, None),
    "rows of two warps": (NormProblem(9, 1001, "rms", "bfloat16", "bfloat16", None, True), 0, None),
    "misaligned pointers": (
        NormProblem(5, 1000, "layer", "bfloat16", "bfloat16", "bfloat16", True), 1, None),
    "one row a block": (NormProblem(5, 3000, "layer", "float32", "bfloat16", "float32"), 0, None),
    "split": (NormProblem(5, 1304, "layer", "float16", "float32", "float32", True), 0, SPLIT),
    "split, misaligned": (NormProblem(4, 1304, "rms", "bfloat16", "float32", None, True), 1, SPLIT),
    "split, rows of several batches": (
        NormProblem(75, 520, "layer", "float32", "float32", "bfloat16"), 0, Split(32, 1)),
    "split, ragged": (
        NormProblem(37, 1001, "layer", "bfloat16", "bfloat16", "float16", True, True), 3, SPLIT),
    "split, ragged, more parts than lanes": (
        NormProblem(3, 8195, "layer", "float16", "float16", "float16"), 0, Split(32, 1)),
    "split, ragged, pointers apart": (
        NormProblem(19, 1003, "rms", "float32", "bfloat16", None, True), (1, 2), SPLIT),
    "staged, rows share a warp, last tile cut": (
        NormProblem(147, 24, "layer", "bfloat16", "float32", "bfloat16", True), 0,
        Staged(64, 4, stages=4, store_tiles=True)),
    "staged, odd rows": (
        NormProblem(100, 33, "rms", "float16", "float16", None, True, True), 0,
        Staged(64, 8, stages=4, store_tiles=True)),
    "staged, a warp a row": (
        NormProblem(57, 264, "layer", "float16", "float16", "float32"), 0,
        Staged(64, 32, stages=3)),
    "staged, wide": (
        NormProblem(23, 1304, "layer", "bfloat16", "bfloat16", "float32", True), 0, WIDE),
    "staged, wide, odd rows, several a tile": (
        NormProblem(43, 333, "rms", "bfloat16", "float32", None, True), 0,
        Staged(64, 64, stages=4, turns=8, store_tiles=True)),
    "staged, wide, rows side by side": (
        NormProblem(23, 1304, "layer", "bfloat16", "bfloat16", "float32", True), 0,
        Staged(192, 64, stages=4)),
    "staged, wide, odd rows side by side": (
        NormProblem(43, 333, "rms", "float16", "float16"), 0,
        Staged(128, 64, stages=4, turns=4, store_tiles=True)),
    "staged, cluster": (
        NormProblem(17, 2056, "layer", "bfloat16", "bfloat16", "float32", True), 0, CLUSTER),
    "staged, cluster of 3, one short": (
        NormProblem(9, 1000, "layer", "float32", "bfloat16", "bfloat16"), 0,
        Staged(64, 64, stages=4, cluster=3, store_tiles=True)),
    "staged, a block a tile": (
        NormProblem(37, 264, "layer", "float16", "bfloat16", "float32", True), 0,
        Staged(96, 32, stages=1, hold_gamma=False)),
    "staged, a block a row": (
        NormProblem(7, 1304, "layer", "bfloat16", "bfloat16", "float32"), 0,
        Staged(64, 64, stages=1, hold_gamma=False)),
    "staged, a cluster a row": (
        NormProblem(5, 2056, "layer", "bfloat16", "float32", "bfloat16", True), 0,
        Staged(64, 64, stages=1, cluster=3, hold_gamma=False)),
    "registers of a cluster": (
        NormProblem(5, 2056, "layer", "bfloat16", "float32", "bfloat16", True), 0,
        Geometry(64, cluster=2)),
    "registers of a cluster of 5, one short, parameters with the row": (
        NormProblem(3, 8120, "layer", "float16", "float16", "float32", False, True), 0,
        Geometry(96, cluster=5, hold_gamma=True)),
    "registers of a cluster of 16": (
        NormProblem(2, 4096, "rms", "float32", "bfloat16", None, True), 0,
        Geometry(64, cluster=16)),
    "ragged, a block a row": (
        NormProblem(19, 1001, "layer", "bfloat16", "bfloat16", "bfloat16"), 0,
        Staged(64, 64, stages=1, hold_gamma=False, ragged=True)),
    "ragged, a warp a row": (
        NormProblem(37, 33, "layer", "bfloat16", "float32", "bfloat16", True, True), 0, RAGGED),
    "ragged, a warp a row, last words empty": (
        NormProblem(21, 250, "rms", "float16", "float16", None), 0,
        Staged(64, 32, stages=3, ragged=True)),
    "ragged, float32": (
        NormProblem(21, 333, "layer", "float32", "bfloat16", "float32", True), 0, RAGGED),
    "ragged, wide": (
        NormProblem(43, 1001, "layer", "bfloat16", "bfloat16", "float32", True), 0, WIDE_RAGGED),
    "ragged, wide, rows of half words": (
        NormProblem(43, 1004, "rms", "float16", "float32"), 0, WIDE_RAGGED),
    "ragged, wide, rows side by side": (
        NormProblem(43, 1003, "layer", "float16", "bfloat16", "float16", False, True), 0,
        Staged(192, 64, stages=4, ragged=True)),
    "ragged, cluster": (
        NormProblem(33, 2057, "layer", "bfloat16", "bfloat16", "float32", True), 0, CLUSTER_RAGGED),
    "ragged, cluster of 3": (
        NormProblem(9, 1030, "layer", "float32", "bfloat16", "bfloat16"), 0,
        Staged(64, 64, stages=4, cluster=3, ragged=True)),
    "resident": (NormProblem(9, 2056, "layer", "bfloat16", "bfloat16", "float32"), 0, RESIDENT),
    "resident, fewer rows than the lag": (
        NormProblem(1, 1304, "rms", "float32", "float32", None, False, True), 0, RESIDENT),
    "resident, add": (
        NormProblem(7, 1304, "rms", "float16", "float32", None, True), 0, Resident(64, 2, 6, 2, 1)),
    "resident, misaligned": (
        NormProblem(5, 1304, "layer", "bfloat16", "bfloat16", "bfloat16", True), 1, RESIDENT),
    "resident, ragged": (
        NormProblem(37, 1001, "layer", "bfloat16", "bfloat16", "float16", True, True), 3, RESIDENT),
    "resident, ragged, few rows": (NormProblem(3, 2057, "rms", "float16", "float16"), 0, RESIDENT),
    "resident, ragged, pointers apart": (
        NormProblem(19, 1003, "layer", "float32", "bfloat16", "float32", True), (1, 2), RESIDENT),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_norm_kernels_match_float64(case, built, rng, capfd):
    problem, offset, geometry = CASES[case]
    check(problem, built, rng, geometry, offset)
    complaints = capfd.readouterr().err
    assert "misaligned" not in complaints, complaints


#        rows, cols, kind, x, gamma, beta, add, zero_centered; geometry
RAGGED_CASES = {
    "parts of a warp": (
        NormProblem(43, 255, "layer", "bfloat16", "bfloat16", "float32", False, True),
        Ragged(16, 4, 2, 1)),
    "a warp, float32": (
        NormProblem(21, 333, "rms", "float32", "float16", None, True), Ragged(32, 2, 4, 1)),
    "warps side by side, not all own as many words": (
        NormProblem(37, 1001, "layer", "float16", "float16", "bfloat16", True),
        Ragged(96, 2, 2, 1)),
    "half words, fewer rows than places": (
        NormProblem(3, 1004, "layer", "bfloat16", "float32", "bfloat16"), Ragged(64, 1, 8, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", RAGGED_CASES)
def test_ragged_rows_in_registers_match_float64(case, built, rng, capfd):
    problem, geometry = RAGGED_CASES[case]
    check_forward(problem, random_arrays(problem, rng), built, geometry)
    complaints = capfd.readouterr().err
    assert "misaligned" not in complaints, complaints


@pytest.mark.parametrize("kind, geometry", [*KINDS_AND_GEOMETRIES, ("layer", IN_REGISTERS)])
def test_forward_keeps_precision_far_from_zero(kind, geometry, built, rng):
    """A mean of a thousand deviations: sums of squares less squared sums would keep one digit."""
    problem = NormProblem(3, 1000, kind, "float32", "float32", None)
    arrays = random_arrays(problem, rng)
    arrays.x[...] = arrays.x + 1000
    got = forward(problem, arrays, built, geometry)
    centre = arrays.x.astype(np.float64).mean(1, keepdims=True) if kind == "layer" else 0
    rstd = 1 / np.sqrt(((arrays.x.astype(np.float64) - centre) ** 2).mean(1) + EPSILON)
    # A value less its mean is off by half a float32 unit of 1000, 3e-5 of a deviation.
    assert_close("rstd", got["rstd"], rstd, 3e-5)
    if kind == "layer":
        assert_close("y", got["y"], (arrays.x - centre) * rstd[:, None] * arrays.gamma, 1e-4)


@pytest.mark.parametrize("geometry", [None, WIDE, CLUSTER, RAGGED, IN_REGISTERS], ids=str)
def test_a_constant_row_is_its_own_mean(geometry, built, rng):
    """Where the product by 1 / 1000, rounded, is not: an ulp of this value is many deviations."""
    problem = NormProblem(3, 1000, "layer", "bfloat16", "float32", "float32")
    arrays = random_arrays(problem, rng)
    arrays.x[...] = np.asarray([[20608.0], [-1288.0], [170.0]])
    got = forward(problem, arrays, built, geometry)
    np.testing.assert_array_equal(got["mean"], [20608.0, -1288.0, 170.0])
    beta = np.broadcast_to(arrays.beta.astype(got["y"].dtype), got["y"].shape)
    np.testing.assert_array_equal(got["y"], beta)


@pytest.mark.parametrize(
    "kind, geometry", [*KINDS_AND_GEOMETRIES, ("layer", RESIDENT), ("rms", RESIDENT)]
)
def test_backward_of_tiny_rows_is_finite(kind, geometry, built, rng):
    """A deviation whose reciprocal is a float32 and its square is not, without an epsilon."""
    problem = NormProblem(3, 1000, kind, "float32", "float32", None)
    arrays = random_arrays(problem, rng)
    arrays.x[...] *= np.float32(1e-20)
    x = arrays.x.astype(np.float64)
    mean = x.mean(1) if kind == "layer" else np.zeros(3)
    rstd = 1 / np.sqrt(((x - mean[:, None]) ** 2).mean(1))
    saved = {"mean": np.float32(mean)} if kind == "layer" else {}
    dx, dgamma = backward(problem, arrays, saved | {"rstd": np.float32(rstd)}, built, geometry)
    vjp = references.layer_norm_vjp_reference
    if kind == "rms":
        vjp = references.rms_norm_vjp_reference
    wanted = vjp(arrays.dy, arrays.x, arrays.gamma, epsilon=0.0)
    assert_close("dx", dx, wanted.x, bound("float32"))
    assert_close("dgamma", dgamma, wanted.gamma, 2e-6)


@pytest.mark.parametrize("kind, geometry", KINDS_AND_GEOMETRIES)
def test_not_finite_stays_in_its_row(kind, geometry, built, rng):
    problem = NormProblem(4, 1000, kind, "float32", "float32", None)
    arrays = random_arrays(problem, rng)
    clean = forward(problem, arrays, built, geometry)
    arrays.x[1, 3], arrays.x[2, 5] = np.nan, np.inf
    arrays.dy[3, 7] = np.nan
    got = forward(problem, arrays, built, geometry)
    np.testing.assert_array_equal(got["y"][[0, 3]], clean["y"][[0, 3]])
    assert np.isnan(got["y"][1]).all()
    # An infinite mean square makes the rest of an RMSNorm's row zero; a mean leaves no number.
    others = np.delete(got["y"][2], 5)
    assert np.isnan(got["y"][2, 5])
    assert np.isnan(others).all() if kind == "layer" else (others == 0).all()

    dx, dgamma = backward(problem, arrays, got, built, geometry)
    assert np.isfinite(dx[0]).all()
    assert np.isnan(dx[1]).all()
    assert np.isnan(dx[3]).all()
    assert np.isnan(dgamma).all()  # row 1 is NaN throughout
