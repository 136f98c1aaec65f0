"""Rows at the edges of what numbers can be, for the norms' kernels on the host and on a GPU.

Everything is compared with float64: NaN and infinities where float64 has them, and the rest within
rounding, with what the row itself costs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests import references
from tests.cases import DTYPES
from tests.closeness import FLOAT32_EPSILON, epsilon, tolerance

ROWS = 9
EPSILON = np.float32(1e-12)  # beside which the smallest variances here still count


@dataclass(frozen=True)
class Rows:
    """Operands of both passes of a norm; `mean_by_deviation` of the rows of x."""

    x: np.ndarray
    gamma: np.ndarray
    dy: np.ndarray
    mean_by_deviation: float = 0.0


def _huge_mean(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Rows:
    """Sums of squares less squared sums would keep few digits, or none."""
    mean, deviation = (1e4, 1.0) if dtype == "float32" else (300.0, 4.0)
    return _around(rng, shape, dtype, mean, deviation)


def _tiny_variance(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Rows:
    """Rows that differ from 1 in their last digits."""
    deviation = 1e-4 if dtype == "float32" else 4 * epsilon(DTYPES[dtype])
    return _around(rng, shape, dtype, 1.0, deviation)


def _around(
    rng: np.random.Generator, shape: tuple[int, int], dtype: str, mean: float, deviation: float
) -> Rows:
    plain = _plain(rng, shape, dtype)
    x = (mean + deviation * rng.standard_normal(shape)).astype(DTYPES[dtype])
    return Rows(x, plain.gamma, plain.dy, mean / deviation)


def _plain(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Rows:
    x, dy = (rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
    return Rows(x, rng.standard_normal(shape[1]).astype(np.float32), dy)


def _three_hundred(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Rows:
    """The square of one is more than a float16 holds."""
    plain = _plain(rng, shape, dtype)
    x = (300 * np.sign(rng.standard_normal(shape))).astype(DTYPES[dtype])
    x[:, 0] = 300
    x[:, -1] = -300  # no row is constant
    return Rows(x, plain.gamma, plain.dy)


def _not_finite(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Rows:
    """One NaN or infinity in a row, or a row of nothing else; the first and last rows are plain."""
    rows = _plain(rng, shape, dtype)
    x, dy = rows.x, rows.dy
    middle = shape[1] // 2
    x[1, middle], x[2, middle], x[3, -1] = np.nan, np.inf, -np.inf
    x[4], x[5], x[6] = np.inf, -np.inf, np.nan
    dy[7, 0] = np.nan
    return rows


def _subnormal(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Rows:
    """x is subnormal, and by a small gamma so is y; dy is small enough for dx to be a float16."""
    plain = _plain(rng, shape, dtype)
    size = 2e-6 if dtype == "float16" else 1e-39
    x = (size * rng.standard_normal(shape)).astype(DTYPES[dtype])
    dy = (1e-3 * plain.dy.astype(np.float32)).astype(DTYPES[dtype])
    return Rows(x, 1e-6 * plain.gamma, dy)


EDGES: Mapping[str, Callable[[np.random.Generator, tuple[int, int], str], Rows]] = {
    "huge mean": _huge_mean,
    "tiny variance": _tiny_variance,
    "300": _three_hundred,
    "not finite": _not_finite,
    "subnormal": _subnormal,
}


def check(edge: str, kind: str, rows: Rows, got: Mapping[str, Any]) -> None:
    """`got`: y, dx, dgamma and, of a layer norm, dbeta."""
    options = {"epsilon": float(EPSILON)}
    op = "layer_norm" if kind == "layer" else "rms_norm"
    with np.errstate(all="ignore"):
        value = getattr(references, f"{op}_reference")(rows.x, rows.gamma, **options)
        vjp = getattr(references, f"{op}_vjp_reference")
        cotangents = vjp(rows.dy, rows.x, rows.gamma, **options)
    count, cols = rows.x.shape
    # A mean of float32 is off by half a unit of its own size, of which a deviation may be little.
    cost = 2 * FLOAT32_EPSILON * rows.mean_by_deviation if kind == "layer" else 0.0
    for name, want, reduced, roundings in (
        ("y", value.y, cols, 1),
        ("dx", cotangents.x, cols, 2),
        ("dgamma", cotangents.gamma, count + cols, 1),
        ("dbeta", cotangents.beta, count, 1),
    ):
        if name in got:
            limit = tolerance(got[name].dtype, reduced, roundings) + cost
            _assert_same(np.asarray(got[name]), want, limit, f"{edge}, {kind}: {name}")


def _assert_same(got: np.ndarray, want: np.ndarray, limit: float, what: str) -> None:
    wide = got.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(want), err_msg=what)
    infinite = np.isinf(want)
    np.testing.assert_array_equal(wide[infinite], want[infinite], err_msg=what)
    finite = np.isfinite(want)
    if not finite.any():
        return
    off = np.abs(wide[finite] - want[finite]).max()
    largest = np.abs(want[finite]).max()
    smallest = float(ml_dtypes.finfo(got.dtype).smallest_subnormal)
    assert off <= limit * largest + smallest, (
        f"{what}: relative error {off / largest:.3g}, tolerance {limit:.3g}"
    )
