"""Softmax calls that users of neighbouring libraries reported wrong, by the number of the case.

The tests of a class, for a CPU in `test_cases_rows.py` and for a GPU in `gpu/test_cases_gpu.py`.
Values and gradients against float64, every dtype.
"""

import jax
import numpy as np
import pytest

import shardops as so
from tests import calls, cases
from tests.primitives import test_softmax_reference as oracle
from tests.primitives.test_softmax_reference import SoftmaxCase
from tests.reported import Reported

every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES)
each_alignment = pytest.mark.parametrize("causal", ["upper_left", "bottom_right"])


class ReportedSoftmax(Reported):
    def value_and_gradient(self, case, arrays, dy):
        """y and dx, in one compiled program."""
        x, rest = arrays["x"], {n: a for n, a in arrays.items() if n != "x"}
        with self.launches():
            y, gradients = calls.value_and_gradients(
                lambda x: so.softmax(x, **rest, **case.options), {"x": x}, (dy,)
            )
            jax.block_until_ready((y, gradients))
        assert y.dtype == gradients["x"].dtype == x.dtype
        return y, gradients["x"]

    def check(self, case, rng, dtype):
        arrays, dy = case.arrays(rng, dtype), cases.random(rng, case.shape, dtype)
        y, dx = self.value_and_gradient(case, arrays, dy)
        oracle.check(case, y, dx, arrays, dy)

    @every_dtype
    @pytest.mark.parametrize("kind", ["finite", "-inf", "nan", "inf"])
    @pytest.mark.parametrize("mask_shape", [(4, 16), (3, 1, 4, 16), (3, 1, 4, 1)])
    def test_case_10_masked_row_is_zero(self, rng, mask_shape, kind, dtype):
        """And so is its gradient, whatever the logits are; the other rows are as without it."""
        case = SoftmaxCase("", (3, 2, 4, 16), mask_shape)
        x, dy = (cases.random(rng, case.shape, dtype) for _ in range(2))
        mask = np.zeros(mask_shape, bool)
        mask[..., 2, :] = True
        if kind != "finite":
            x[:, :, 2] = float(kind)
        y, dx = self.value_and_gradient(case, {"x": x, "mask": mask}, dy)
        for one in (y, dx):
            np.testing.assert_array_equal(np.asarray(one[:, :, 2], np.float32), 0)
        clean = np.where(mask, 0, x).astype(x.dtype)
        oracle.check(case, y, dx, {"x": clean, "mask": mask}, dy)

    @every_dtype
    def test_case_10_nan_that_is_seen_fills_its_row_and_no_other(self, rng, dtype):
        """One that is masked does not act."""
        case = SoftmaxCase("", (4, 16), (4, 16))
        x, dy = (cases.random(rng, case.shape, dtype) for _ in range(2))
        mask = np.zeros(case.shape, bool)
        mask[:, 7] = mask[2, 3] = True
        x[1, 3] = x[2, 3] = np.nan
        y, dx = (np.asarray(a) for a in self.value_and_gradient(case, {"x": x, "mask": mask}, dy))
        seen = ~mask[1]
        for one in (y, dx):
            assert np.isnan(one[1, seen].astype(np.float32)).all()
        np.testing.assert_array_equal(y[:, 7].astype(np.float32), 0)
        others = [0, 2, 3]
        clean = {"x": np.where(mask, 0, x).astype(x.dtype)[others], "mask": mask[others]}
        part = SoftmaxCase("", (3, 16), (3, 16))
        oracle.check(part, y[others], dx[others], clean, dy[others])

    @every_dtype
    @pytest.mark.parametrize("queries", [1, 3])
    @pytest.mark.parametrize("keys", [1, 2, 15, 17, 33, 127, 129])
    def test_case_11_any_length(self, rng, keys, queries, dtype):
        self.check(SoftmaxCase("", (2, 2, queries, keys), scale=0.5), rng, dtype)

    @every_dtype
    def test_case_12_long_rows_of_one_query(self, rng, dtype):
        self.check(SoftmaxCase("", (3, 1, 20000)), rng, dtype)
        self.check(SoftmaxCase("", (3, 1, 20000), (3, 1, 20000), "bottom_right", 0.3), rng, dtype)

    @every_dtype
    @pytest.mark.parametrize("queries, keys", [(2, 5), (5, 2)])
    @each_alignment
    def test_case_13_causal_of_unequal_lengths(self, rng, causal, queries, keys, dtype):
        """Equal logits: each query shares its weight among the keys that it sees, if any; the
        corners are written out here, drawn logits against the oracle."""
        case = SoftmaxCase("", (3, queries, keys), causal=causal)
        seen = {
            (2, "upper_left"): [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
            (2, "bottom_right"): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
            (5, "upper_left"): [[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]],
            (5, "bottom_right"): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
        }[queries, causal]
        seen = np.broadcast_to(seen, case.shape)
        x, dy = np.zeros(case.shape, cases.DTYPES[dtype]), cases.random(rng, case.shape, dtype)
        y, dx = (np.asarray(a, np.float64) for a in self.value_and_gradient(case, {"x": x}, dy))
        np.testing.assert_allclose(y, seen / np.maximum(seen.sum(-1, keepdims=True), 1), rtol=1e-2)
        np.testing.assert_array_equal(y == 0, seen == 0)
        np.testing.assert_array_equal(dx[seen == 0], 0)
        self.check(case, rng, dtype)

    @every_dtype
    def test_case_13_rows_that_see_nothing_by_mask_and_causal_together(self, rng, dtype):
        """Query 0 sees key 0 alone, and that is masked."""
        case = SoftmaxCase("", (4, 4), (4,), "upper_left")
        arrays = {"x": np.ones((4, 4), cases.DTYPES[dtype]), "mask": np.arange(4) == 0}
        dy = cases.random(rng, case.shape, dtype)
        y, dx = self.value_and_gradient(case, arrays, dy)
        want = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, 1 / 3, 1 / 3, 1 / 3]]
        np.testing.assert_allclose(np.asarray(y, np.float32), want, rtol=1e-2)
        np.testing.assert_array_equal(np.asarray(dx[0], np.float32), 0)
        oracle.check(case, y, dx, arrays, dy)
