"""Softmax and its derivative in float64 numpy, the cases of its tests; and checks of the oracle.

No JAX and nothing of the library: an error in the library cannot repeat itself here.
"""

import dataclasses

import numpy as np
import pytest

from tests import cases
from tests.closeness import assert_close

CAUSAL = (None, "upper_left", "bottom_right")


@dataclasses.dataclass(frozen=True)
class SoftmaxCase:
    id: str
    shape: cases.Dims
    mask: cases.Dims | None = None
    causal: str | None = None
    scale: float = 1.0

    def arrays(self, rng: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
        """x, and a mask that hides a third of the keys: of some queries all."""
        arrays = {"x": cases.random(rng, self.shape, dtype, 2.0)}
        if self.mask is not None:
            arrays["mask"] = rng.random(self.mask) < 0.33
            if self.mask[-2:-1] and self.mask[-2] > 1:
                arrays["mask"][..., 1, :] = True
        return arrays

    @property
    def options(self) -> dict:
        return {"scale": self.scale, "causal": self.causal}


SCORES = (2, 3, 5, 8)  # batch, heads, queries, keys

CASES = [
    SoftmaxCase("matrix", (6, 64)),
    SoftmaxCase("keys-alone", (64,)),
    SoftmaxCase("scores", SCORES, scale=0.125),
    SoftmaxCase("three-batch-dims", (2, 2, 3, 5, 8)),
    SoftmaxCase("negative-scale", SCORES, scale=-0.5),
    SoftmaxCase("scale-zero", SCORES, scale=0.0),
    SoftmaxCase("one-key", (4, 1), scale=3.0),
    SoftmaxCase("one-query", (2, 3, 1, 33)),
    SoftmaxCase("mask", SCORES, SCORES),
    SoftmaxCase("mask-of-the-batch", SCORES, (2, 1, 1, 8)),
    SoftmaxCase("mask-of-heads", SCORES, (1, 3, 5, 8)),
    SoftmaxCase("mask-of-queries-and-keys", SCORES, (5, 8)),
    SoftmaxCase("mask-of-keys", SCORES, (8,)),
    SoftmaxCase("mask-of-queries", SCORES, (5, 1)),
    SoftmaxCase("mask-of-everything", SCORES, ()),
    SoftmaxCase("mask-keys-alone", (64,), (64,)),
    SoftmaxCase("upper-left", SCORES, causal="upper_left"),
    SoftmaxCase("bottom-right", SCORES, causal="bottom_right"),
    SoftmaxCase("upper-left-tall", (2, 8, 5), causal="upper_left"),
    SoftmaxCase("bottom-right-tall", (2, 8, 5), causal="bottom_right"),
    SoftmaxCase("square", (3, 7, 7), causal="bottom_right", scale=0.3),
    SoftmaxCase("both", SCORES, (2, 1, 5, 8), "upper_left", 0.7),
    SoftmaxCase("both-bottom-right", (2, 3, 8, 5), (3, 1, 5), "bottom_right", 0.7),
]

EMPTY = [
    SoftmaxCase("no-batch", (0, 5, 8), causal="upper_left"),
    SoftmaxCase("no-queries", (2, 0, 8), (1, 8), "bottom_right"),
    SoftmaxCase("no-keys", (2, 5, 0), causal="bottom_right"),
    SoftmaxCase("no-keys-masked", (5, 0), (5, 1)),
    SoftmaxCase("nothing", (0,)),
]


def hidden(shape: cases.Dims, mask=None, causal: str | None = None) -> np.ndarray:
    """True where a query may not see a key."""
    out = np.zeros(shape, bool) if mask is None else np.broadcast_to(mask, shape).copy()
    if causal is not None:
        queries, keys = shape[-2:]
        for q in range(queries):
            last = q if causal == "upper_left" else q + keys - queries
            for k in range(keys):
                out[..., q, k] |= k > last
    return out


def softmax_reference(x, mask=None, *, scale=1.0, causal=None) -> np.ndarray:
    """exp(scale x) / sum over the keys that are seen; 0 at the others."""
    x = scale * np.asarray(x).astype(np.float64)
    out, hide = np.zeros(x.shape), hidden(x.shape, mask, causal)
    for row in np.ndindex(x.shape[:-1]):
        seen = x[row][~hide[row]]
        if seen.size:
            e = np.exp(seen - seen.max())
            out[row][~hide[row]] = e / e.sum()
    return out


def softmax_vjp_reference(dy, x, mask=None, *, scale=1.0, causal=None) -> np.ndarray:
    """scale y (dy - sum(y dy))."""
    dy = np.asarray(dy).astype(np.float64)
    y = softmax_reference(x, mask, scale=scale, causal=causal)
    return scale * y * (dy - (y * dy).sum(-1, keepdims=True))


def check(case: SoftmaxCase, got, dx, arrays, dy) -> None:
    """Each row against its own largest value: a row that sees two keys must not excuse the others.

    Roundings on the way to dx: y, the sum of y dy with it, dx.
    """
    y = softmax_reference(**arrays, **case.options)
    largest = y.max(-1, keepdims=True, initial=0)
    _check_rows(got, y, largest, case, 1, "y")
    want = softmax_vjp_reference(dy, **arrays, **case.options)
    top = np.abs(np.asarray(dy, np.float64)).max(-1, keepdims=True, initial=0)
    _check_rows(dx, want, abs(case.scale) * largest * top, case, 3, "dx")


def _check_rows(got, want, unit, case, roundings, what):
    unit = np.where(unit == 0, 1, unit)
    assert (got.shape, np.shape(want)) == (case.shape, case.shape), what
    relative = np.asarray(got).astype(np.float64) / unit
    # A gradient may cancel to much less than its terms, such as that of one key: add the unit.
    assert_close(
        relative + 1, want / unit + 1, dtype=got.dtype, reduced=case.shape[-1],
        roundings=roundings, what=what,
    )  # fmt: skip


# --- the oracle itself --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_softmax_vjp_reference(rng, case):
    """Against differences of its values."""
    arrays = case.arrays(rng, "float32")
    x, dy = arrays.pop("x").astype(np.float64), rng.standard_normal(case.shape)
    want, step = np.zeros(x.shape), 1e-6
    for at in np.ndindex(x.shape):
        for sign in (1, -1):
            moved = x.copy()
            moved[at] += sign * step
            value = (softmax_reference(moved, **arrays, **case.options) * dy).sum()
            want[at] += sign * value / (2 * step)
    got = softmax_vjp_reference(dy, x, **arrays, **case.options)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


def test_hidden_keys_of_causal_masks():
    """Both corners, written out."""
    wide = {"upper_left": ["01111", "00111"], "bottom_right": ["00001", "00000"]}
    tall = {
        "upper_left": ["01", "00", "00", "00", "00"],
        "bottom_right": ["11", "11", "11", "01", "00"],
    }
    for shape, want in (((2, 5), wide), ((5, 2), tall)):
        for causal, rows in want.items():
            got = hidden(shape, None, causal)
            assert ["".join(str(int(v)) for v in row) for row in got] == rows, (shape, causal)
