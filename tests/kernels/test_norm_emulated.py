"""The norm kernels' own source, run on the host thread by thread, against float64."""

import itertools
import pathlib

import numpy as np
import pytest

from shardops.kernels.norm_plan import Geometry, NormProblem, backward_plan, forward_plan
from shardops.kernels.target import target_for
from tests import references
from tests.closeness import epsilon
from tests.kernels import emulator
from tests.kernels.norm_problems import DTYPES, Arrays, blank, random_arrays

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)

# Few multiprocessors, so that a block gets several rows.
TARGET = target_for("sm_90", 2)
EPSILON = np.float32(1e-5)
LONG = Geometry(threads_per_row=128, long=True)
KINDS_AND_GEOMETRIES = list(itertools.product(["layer", "rms"], [None, LONG]))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("emulated")


def forward(problem, arrays: Arrays, built, geometry=None, offset=0) -> dict[str, np.ndarray]:
    shape, rows = arrays.x.shape, arrays.x.shape[:1]
    results = {"y": blank(shape, problem.x, offset)}
    results |= {"h": blank(shape, problem.x, offset)} if problem.add else {}
    results |= {"mean": blank(rows, "float32")} if problem.kind == "layer" else {}
    results |= {"rstd": blank(rows, "float32")}
    operands = [arrays.x, arrays.gamma, arrays.beta, arrays.add]
    emulator.run(
        forward_plan(problem, TARGET, geometry),
        built,
        [operand for operand in operands if operand is not None],
        list(results.values()),
        [np.int64(rows[0]), EPSILON],
    )
    return results


def backward(problem, arrays: Arrays, saved, built, geometry=None, offset=0):
    plan = backward_plan(problem, TARGET, geometry)
    h = saved.get("h", arrays.x)
    dx = blank(h.shape, problem.x, offset)
    partials = blank(plan.workspace, "float32")
    operands = [arrays.dy, h, arrays.gamma, saved.get("mean"), saved["rstd"], arrays.dh]
    operands = [operand for operand in operands if operand is not None]
    emulator.run(plan.main, built, operands, [dx, partials], [np.int64(len(h))])
    sums = [blank(arrays.gamma.shape, "float32") for _ in range(problem.sums)]
    emulator.run(plan.finish, built, [partials], sums, [np.int32(plan.workspace[1])])
    return dx, *sums


def assert_close(name: str, got: np.ndarray, want: np.ndarray, bound: float) -> None:
    scale = np.linalg.norm(want) or 1.0
    error = np.linalg.norm(got.astype(np.float64) - want) / scale
    assert error <= bound, f"{name}: relative error {error:.2e}, bound {bound:.2e}"


# Rounding a result costs half a unit; float32 sums of n terms about sqrt(n) units of float32, less
# than 1e-6 up to the lengths here.
def bound(dtype: str) -> float:
    return epsilon(DTYPES[dtype]) / 2 + 1e-6


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
    "long": (NormProblem(5, 1304, "layer", "float16", "float32", "float32", True), 0, LONG),
    "long, misaligned": (NormProblem(4, 1300, "rms", "bfloat16", "float32", None, True), 1, LONG),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_norm_kernels_match_float64(case, built, rng, capfd):
    problem, offset, geometry = CASES[case]
    arrays = random_arrays(problem, rng, offset)
    got = forward(problem, arrays, built, geometry, offset)

    options = {"add": arrays.add, "epsilon": EPSILON, "zero_centered_gamma": problem.zero_centered}
    if problem.kind == "layer":
        want = references.layer_norm_reference(arrays.x, arrays.gamma, arrays.beta, **options)
        vjp = references.layer_norm_vjp_reference
    else:
        want = references.rms_norm_reference(arrays.x, arrays.gamma, **options)
        vjp = references.rms_norm_vjp_reference
    assert_close("y", got["y"], want.y, bound(problem.x))
    if problem.add:
        np.testing.assert_array_equal(got["h"].astype(np.float64), want.h)
    mean = want.h.mean(1) if problem.kind == "layer" else np.zeros(problem.rows)
    if problem.kind == "layer":
        assert_close("mean", got["mean"], mean, 1e-6)
    rstd = 1 / np.sqrt(((want.h - mean[:, None]) ** 2).mean(1) + EPSILON)
    assert_close("rstd", got["rstd"], rstd, 1e-6)

    dx, *sums = backward(problem, arrays, got, built, geometry, offset)
    wanted = vjp(arrays.dy, arrays.x, arrays.gamma, dh=arrays.dh, **options)
    # At one column dx is what is left of a difference of equals: its error is the parts' size.
    assert_close("dx", dx, wanted.x, bound(problem.x) * (1 if problem.cols > 1 else 1e3))
    assert_close("dgamma", sums[0], wanted.gamma, 2e-6)
    if problem.beta is not None:
        assert_close("dbeta", sums[1], wanted.beta, 2e-6)
    complaints = capfd.readouterr().err
    assert "misaligned" not in complaints, complaints


@pytest.mark.parametrize("kind, geometry", KINDS_AND_GEOMETRIES)
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
