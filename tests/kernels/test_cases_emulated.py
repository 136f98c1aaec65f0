"""Reported cases 2, 3, 4, 6 and 9 to 13, and rows at the edges of numbers, on the kernels' own
source: run on the host, thread by thread, with the launches that are planned for them."""

import pathlib

import numpy as np
import pytest

from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.target import target_for
from tests import norm_edges
from tests.closeness import epsilon
from tests.kernels import emulator, norm_emulation
from tests.kernels.norm_emulation import assert_close, bound
from tests.kernels.norm_problems import DTYPES, Arrays, random_arrays
from tests.kernels.softmax_problems import (
    Case,
    backward_float64,
    forward_float64,
    run_backward,
    run_forward,
)
from tests.norm_edges import EDGES, EPSILON, ROWS

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)

TARGET = target_for("sm_90", 2)
KINDS = ("layer", "rms")
GUARD = 256  # elements before and after each result


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def aligned(capfd):
    """No access is at an address that its width does not divide."""
    yield
    complaints = capfd.readouterr().err
    assert "misaligned" not in complaints, complaints


# --- norms ----------------------------------------------------------------------------------------


def run(problem: NormProblem, rows: norm_edges.Rows, built: pathlib.Path, epsilon: np.float32):
    """Both passes: y, dx, dgamma."""
    arrays = Arrays(rows.x, rows.gamma, None, None, rows.dy, None)
    saved = norm_emulation.forward(problem, arrays, built, epsilon=epsilon)
    dx, dgamma = norm_emulation.backward(problem, arrays, saved, built)
    return {"y": saved["y"], "dx": dx, "dgamma": dgamma}


def normalised(kind: str, x: np.ndarray, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.mean(1, keepdims=True) if kind == "layer" else x
    return x / np.sqrt((x**2).mean(1, keepdims=True) + epsilon)


@pytest.mark.parametrize("kind", KINDS)
def test_case_2_small_variance_in_bfloat16(kind, built, rng):
    rows = norm_edges.Rows(
        (0.058 * rng.standard_normal((8, 32))).astype(DTYPES["bfloat16"]),
        np.ones(32, DTYPES["bfloat16"]),
        rng.standard_normal((8, 32)).astype(DTYPES["bfloat16"]),
    )
    problem = NormProblem(8, 32, kind, "bfloat16", "bfloat16")
    got = run(problem, rows, built, np.float32(1e-6))
    hat = normalised(kind, rows.x, 1e-6)
    assert_close("y", got["y"], hat, bound("bfloat16"))
    assert_close("dgamma", got["dgamma"], (rows.dy.astype(np.float64) * hat).sum(0), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_case_3_squares_of_float16_overflow_nothing(kind, built, rng):
    x = np.full((2, 4096), 300, np.float16)
    x[:, ::2] *= -1
    dy = rng.standard_normal(x.shape).astype(np.float16)
    rows = norm_edges.Rows(x, np.ones(4096, np.float16), dy)
    got = run(NormProblem(2, 4096, kind, "float16", "float16"), rows, built, np.float32(1e-6))
    np.testing.assert_array_equal(got["y"], np.sign(x))
    want = (rows.dy.astype(np.float64) * np.sign(x)).sum(0)
    assert_close("dgamma", got["dgamma"], want, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_case_4_one_is_added_in_float32_and_the_result_rounded_once(kind, built, rng):
    problem = NormProblem(32, 64, kind, "bfloat16", "bfloat16", zero_centered=True)
    arrays = random_arrays(problem, rng)
    arrays.gamma[...] = 15.8125
    y = norm_emulation.forward(problem, arrays, built, epsilon=np.float32(1e-6))["y"]
    want = 16.8125 * normalised(kind, arrays.x, 1e-6)
    assert (y != want.astype(np.float32).astype(y.dtype)).mean() < 5e-3


# length, kind, dtype of x, of gamma
LENGTHS = [
    (1, "rms", "bfloat16", "float32"),
    (3, "layer", "float32", "bfloat16"),
    (7, "rms", "bfloat16", "bfloat16"),
    (1023, "layer", "bfloat16", "float32"),
    (3584, "rms", "float32", "float32"),
    (16384, "layer", "bfloat16", "bfloat16"),
    (65536, "rms", "bfloat16", "bfloat16"),
]


@pytest.mark.usefixtures("guarded", "aligned")
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("cols, kind, x, gamma", LENGTHS)
def test_case_9_any_length_at_any_address(cols, kind, x, gamma, offset, built, rng):
    """And case 6: what is not a result's is not written."""
    problem = NormProblem(5 if cols < 10_000 else 2, cols, kind, x, gamma)
    norm_emulation.check(problem, built, rng, None, offset)


@pytest.fixture
def guarded(monkeypatch):
    """Around each result lie numbers, which stay."""
    made = []

    def blank(shape, dtype, offset=0):
        count = int(np.prod(shape))
        padded = np.full(GUARD + offset + count + GUARD, 7, DTYPES[dtype])
        inside = slice(GUARD + offset, GUARD + offset + count)
        padded[inside] = np.nan
        made.append((padded, inside))
        return padded[inside].reshape(shape)

    monkeypatch.setattr(norm_emulation, "blank", blank)
    yield
    assert made
    for padded, inside in made:
        assert (np.delete(padded, inside) == 7).all()


@pytest.mark.parametrize(
    "kind, cols, dtype",
    [("layer", 1000, "float32"), ("layer", 1000, "bfloat16"), ("rms", 33, "float16")],
)
def test_norm_at_the_edges_of_numbers(kind, cols, dtype, built, rng):
    """The GPU tests have them in every family of kernels."""
    problem = NormProblem(ROWS, cols, kind, dtype, "float32")
    for edge, draw in EDGES.items():
        rows = draw(rng, (ROWS, cols), dtype)
        norm_edges.check(edge, kind, rows, run(problem, rows, built, EPSILON))


# --- softmax --------------------------------------------------------------------------------------


def check_softmax(case: Case, built, rng, x=None, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """y and dx, which are as in float64."""
    x, mask = case.draw(rng) if x is None else x, case.draw_mask(rng) if mask is None else mask
    dy, hidden = case.draw(rng), case.hidden(mask)
    y = run_forward(case, TARGET, built, x, mask)
    want = forward_float64(np.where(hidden, 0, x.astype(np.float64)), hidden, case.scale)
    largest = np.maximum(want.max(-1, keepdims=True), np.finfo(np.float32).tiny)
    limit = epsilon(y.dtype) / 2 + 2e-6
    assert (np.abs(y.astype(np.float64) - want) <= limit * largest).all()
    assert (y[hidden] == 0).all()
    dx = run_backward(case, TARGET, built, dy, y)
    want = backward_float64(dy, y, case.hidden(None), case.scale)
    unit = 2 * abs(case.scale) * largest * np.abs(dy.astype(np.float64)).max(-1, keepdims=True)
    assert (np.abs(dx.astype(np.float64) - want) <= limit * unit).all()
    assert (dx[hidden] == 0).all()
    return y, dx


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_10_masked_row_is_zero(dtype, built, rng):
    case = Case((4, 6, 16), dtype, (4, 6, 16))
    x, mask = case.draw(rng), case.draw_mask(rng)
    for batch, logit in enumerate((0, -np.inf, np.nan, np.inf)):
        x[batch, 2], mask[batch, 2] = logit, True
    y, dx = check_softmax(case, built, rng, x, mask)
    assert (y[:, 2] == 0).all()
    assert (dx[:, 2] == 0).all()


@pytest.mark.parametrize("keys", [1, 2, 15, 17, 33, 127, 129])
def test_case_11_any_length(keys, built, rng):
    """Types and numbers of queries take turns; the GPU tests have all of them."""
    turn = [1, 2, 15, 17, 33, 127, 129].index(keys)
    check_softmax(Case((2, 2, 1 + turn % 2 * 2, keys), (*DTYPES,)[turn % 3]), built, rng)


def test_case_12_long_rows_of_one_query(built, rng):
    check_softmax(Case((3, 1, 20000), "float32"), built, rng)


@pytest.mark.parametrize("queries, keys", [(2, 5), (5, 2)])
def test_case_13_causal_of_unequal_lengths(queries, keys, built, rng):
    """The last key of query 0 is key 0, or as many further as there are more keys."""
    dtype = "bfloat16" if keys > queries else "float16"
    for diagonal in (0, keys - queries):
        y, dx = check_softmax(Case((3, queries, keys), dtype, diagonal=diagonal), built, rng)
        blind = max(0, -diagonal)  # queries that see nothing
        assert (y[:, :blind] == 0).all()
        assert (dx[:, :blind] == 0).all()
        assert (y[:, blind:, 0] > 0).all()
