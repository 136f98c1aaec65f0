"""The softmax kernels' own source, run on the host thread by thread, against float64."""

import pathlib

import numpy as np
import pytest

from shardops.kernels.resident import Resident
from shardops.kernels.softmax import MAX_SCALE
from shardops.kernels.softmax_plan import Geometry
from shardops.kernels.target import target_for
from tests.closeness import epsilon
from tests.kernels import emulator
from tests.kernels.softmax_problems import (
    Case,
    backward_float64,
    forward_float64,
    run_backward,
    run_forward,
)

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)

# Few multiprocessors, so that no row is cut further than a geometry says.
TARGET = target_for("sm_90", 2)
WARP = Geometry("registers", 32, 2)
BLOCK = Geometry("registers", 64)
TWICE = Geometry("registers", 8, 4, hold=False)
CLUSTER = Geometry("registers", 32, parts=2)
WIDE_CLUSTER = Geometry("registers", 64, parts=3, hold=False)
LONG = Geometry("long", 32)
LONG_CLUSTER = Geometry("long", 64, parts=2)
EIGHT_WORDS = Geometry("registers", 32, 1, hold=False)
TILE_OF_4 = Geometry("tile", 32, 32, group=4)
STAGED = Geometry("staged", 32, batch=2)
STAGED_CLUSTER = Geometry("staged", 64, parts=2, batch=1)
RESIDENT = Resident(64, 1, 4, 2, 2)
STAGES = Geometry("long", 32, parts=3, stages=2)

CASES = {
    "tile, causal": (Case((4, 10, 33), diagonal=20), None),
    "tile, mask of queries": (
        Case((2, 333, 13), "bfloat16", (1, 333, 1), scale=-0.5), Geometry("tile", 64, 128)),
    "tile, rows of one thread, causal": (
        Case((3, 67, 9), "float32", diagonal=-3), Geometry("tile", 32, 64)),
    "tile of one key, misaligned": (Case((300, 1), "float16", offset=1), None),
    "tile, causal, mask of the batch": (
        Case((2, 9, 21, 36), "float32", (2, 1, 1, 36), 15, scale=-0.5), None),
    "tile, both, misaligned": (
        Case((3, 5, 7, 13), "float16", (3, 1, 7, 13), 0, 5, offset=3), None),
    "warp, whole words": (Case((5, 256), scale=-1.3), WARP),
    "warp, odd rows": (Case((5, 251), "float16"), WARP),
    "warp, causal, mask of queries and keys": (
        Case((2, 2, 9, 200), "bfloat16", (1, 1, 9, 200), 100, -3), WARP),
    "block, mask of heads, odd": (Case((2, 3, 2, 301), "float32", (1, 3, 1, 301), 250), BLOCK),
    "block, mask of queries": (Case((2, 6, 304), "float16", (1, 6, 1)), BLOCK),
    "computed twice": (Case((6, 232), "bfloat16", (6, 232), scale=0.0), TWICE),
    "eight words, odd, causal, mask of queries and keys": (
        Case((2, 2, 3, 2011), "bfloat16", (1, 1, 3, 2011), 1000, 5, scale=-1.0), EIGHT_WORDS),
    "cluster, misaligned": (Case((3, 264), "float32", scale=-2.0, offset=1), CLUSTER),
    "cluster, odd, causal, both masks": (
        Case((2, 3, 4, 515), "float16", (2, 1, 4, 515), 300, 17), WIDE_CLUSTER),
    "cluster, causal, seen by one block or two": (
        Case((2, 20, 1040), "bfloat16", None, 340), Geometry("registers", 32, parts=4)),
    "cluster, causal, odd, seen by none or one": (
        Case((7, 301), "float32", None, -3), Geometry("registers", 32, parts=2, hold=False)),
    "long": (Case((2, 2, 2203), "bfloat16", (2, 1, 2203), 2000), LONG),
    "long, cluster": (Case((3, 1000), "float32"), LONG_CLUSTER),
    "staged": (Case((5, 1200), "bfloat16"), STAGED),
    "staged, a last chunk of few words": (Case((9, 300), "float32"), Geometry("staged", 64)),
    "staged, odd, causal, mask of queries and keys": (
        Case((2, 2, 7, 1203), "float16", (1, 1, 7, 1203), 800, 60), STAGED),
    "staged, causal, mask of queries": (
        Case((2, 2, 7, 1208), "bfloat16", (1, 1, 7, 1), 800, -300, scale=-0.5), STAGED),
    "staged, mask in chunks": (Case((2, 5, 1216), "bfloat16", (2, 1, 1216)), STAGED),
    "staged, cluster, causal, mask of queries and keys in chunks": (
        Case((2, 2, 5, 528), "float32", (1, 1, 5, 528), 300, 20), STAGED_CLUSTER),
    "staged, cluster, odd": (Case((5, 2003), "bfloat16", offset=3), STAGED_CLUSTER),
    "staged, cluster, misaligned": (
        Case((2, 5, 1000), "float32", (2, 1, 1000), 300, offset=1), STAGED_CLUSTER),
    "long, two stages, misaligned": (
        Case((2, 2, 803), "float16", (1, 2, 803), 400, 1, offset=1), STAGES),
    "resident": (Case((9, 2056), "bfloat16"), RESIDENT),
    "resident, odd": (Case((19, 1003), "float16", scale=-0.5, offset=3), RESIDENT),
    "resident, misaligned": (Case((2, 1304), "float32", scale=0.0, offset=1), RESIDENT),
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("emulated")


def assert_rows_close(what: str, got: np.ndarray, want: np.ndarray, unit: np.ndarray) -> None:
    """Each row against `unit`: rounding costs half a unit in the last place, float32 little."""
    error = np.abs(got.astype(np.float64) - want) / np.where(unit > 0, unit, 1)
    bound = epsilon(got.dtype) / 2 + 2e-6
    assert error.max() <= bound, f"{what}: error {error.max():.2e}, bound {bound:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_softmax_kernels_match_float64(case, built, rng, capfd):
    case, geometry = CASES[case]
    x, mask, dy = case.draw(rng), case.draw_mask(rng), case.draw(rng)
    hidden, later = case.hidden(mask), case.hidden(None)
    if case.diagonal is not None:
        # What is not to be read: the backward's neighbours keep numbers, its own are poison.
        dy[np.broadcast_to(later, dy.shape)] = np.nan
        x[np.broadcast_to(later, x.shape)] = np.nan
    got = run_forward(case, TARGET, built, x, mask, geometry)
    want = forward_float64(x, hidden, case.scale)
    assert_rows_close("y", got, want, want.max(-1, keepdims=True))
    assert (got[hidden] == 0).all()

    dx = run_backward(case, TARGET, built, dy, got, geometry)
    want = backward_float64(dy, got, later, case.scale)
    largest = np.where(later, 0, np.abs(dy.astype(np.float64))).max(-1, keepdims=True)
    unit = abs(case.scale) * got.astype(np.float64).max(-1, keepdims=True) * largest
    assert_rows_close("dx", dx, want, 2 * unit)
    assert (dx[hidden] == 0).all()

    again = run_forward(case, TARGET, built, x, mask, geometry)
    assert again.tobytes() == got.tobytes()
    complaints = capfd.readouterr().err
    assert "misaligned" not in complaints, complaints


@pytest.mark.parametrize(
    "geometry, scale",
    [
        (None, 0.7),
        (TILE_OF_4, 0.7),
        (BLOCK, 0.7),
        (BLOCK, -0.7),
        (BLOCK, 0.0),
        (CLUSTER, 0.7),
        (STAGED, 0.7),
        (LONG, 0.7),
    ],
)
def test_not_finite_acts_as_in_float64(geometry, scale, built, rng):
    """NaN and infinities that are seen or hidden, and rows of nothing but them."""
    case = Case((12, 203), "float32", (12, 203), 203, scale=scale)
    x, mask = case.draw(rng), np.zeros(case.mask, bool)
    x[1, 3] = np.nan
    x[2, 3], mask[2, 3] = np.nan, True
    x[3, 3] = np.inf
    x[4, 3], mask[4, 3] = np.inf, True
    x[5, 3] = -np.inf
    x[6, :] = -np.inf
    x[7, :], mask[7, 50:] = -np.inf, True
    x[8, :], mask[8, :] = np.nan, True
    x[9, :100] = -np.inf
    x[10, 3], mask[10, 5:90] = np.nan, True
    got = run_forward(case, TARGET, built, x, mask, geometry)
    want = forward_float64(x, mask, scale)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-30)
    assert (got[mask] == 0).all()


@pytest.mark.parametrize(
    "geometry", [TILE_OF_4, BLOCK, STAGED, LONG], ids=["tile", "block", "staged", "long"]
)
def test_gradient_of_not_finite_stays_in_its_row(geometry, built, rng):
    case = Case((3, 2, 203), "float32", diagonal=100)
    y, dy = np.abs(case.draw(rng)), case.draw(rng)
    dy[0, 1, 5], dy[1, 1, 102] = np.nan, np.nan  # one is seen, one is not
    dx = run_backward(case, TARGET, built, dy, y, geometry)
    want = backward_float64(dy, y, case.hidden(None), case.scale)
    np.testing.assert_array_equal(np.isnan(dx), np.isnan(want))
    assert np.isnan(dx[0, 1, :102]).all()
    assert (dx[0, 1, 102:] == 0).all()
    np.testing.assert_allclose(dx, want, rtol=1e-4, atol=1e-4)


def test_logits_far_apart_and_far_from_zero(built):
    """Neither the difference nor its product with the scale may overflow into NaN."""
    for scale in (1e-38, -1e-38, 1.0, -MAX_SCALE):
        case = Case((3, 8), "float32", scale=scale)
        near = [2e-38, -1.5e-38, 0, 1e-38, 2e-38, -2e-38, 3e-38, 0]
        x = np.array([[3e38, -3e38, 0, 1, 2, 3, 3e38, 1e38], [1e10] * 8, near], np.float32)
        want = forward_float64(x, np.zeros(x.shape, bool), scale)
        for geometry in (Geometry("registers", 4, 8), STAGED, LONG):
            got = run_forward(case, TARGET, built, x, geometry=geometry)
            np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-30)


TILE = Geometry("tile", 32, 32, group=2)
SIXTEEN = Geometry("registers", 16, 2)
BATCHES = Geometry("staged", 32, batch=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("geometry", [TILE, SIXTEEN, BATCHES], ids=["tile", "registers", "staged"])
def test_each_dtype_at_every_place_in_a_word(geometry, dtype, built, rng):
    """Rows of an odd length start at each place; the last one ends the buffer. Masks do too."""
    case = Case((17, 45), dtype, (17, 45))
    x, dy, mask = case.draw(rng), case.draw(rng), case.draw_mask(rng)
    check_both(case, geometry, built, x, mask, dy, case.draw(rng))


@pytest.mark.parametrize("geometry", [TILE, SIXTEEN, BATCHES], ids=["tile", "registers", "staged"])
@pytest.mark.parametrize("keys", [45, 48])
def test_buffers_start_at_every_place_in_a_word(keys, geometry, built, rng, capfd):
    """Together, which odd rows can share words at, and each at its own."""
    for place, other in [(n, n) for n in range(1, 8)] + [(0, 1), (3, 4), (7, 2)]:
        case = Case((6, keys), "bfloat16", (6, keys), offset=place)  # of the results too
        x, dy, mask = case.draw(rng, other), case.draw(rng), case.draw_mask(rng)
        check_both(case, geometry, built, x, mask, dy, case.draw(rng, other))
    complaints = capfd.readouterr().err
    assert "misaligned" not in complaints, complaints


def check_both(case: Case, geometry, built, x, mask, dy, y) -> None:
    got = run_forward(case, TARGET, built, x, mask, geometry)
    want = forward_float64(x, mask, case.scale)
    assert_rows_close("y", got, want, want.max(-1, keepdims=True))
    assert (got[mask] == 0).all()
    y[...] = got
    nothing = np.zeros(case.shape, bool)
    dx = run_backward(case, TARGET, built, dy, y, geometry)
    unit = got.astype(np.float64).max(-1, keepdims=True) * np.abs(dy.astype(np.float64)).max()
    assert_rows_close("dx", dx, backward_float64(dy, y, nothing, case.scale), 2 * unit)
