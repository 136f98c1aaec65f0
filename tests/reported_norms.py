"""Norms that users of neighbouring libraries reported wrong, by the number of the case.

The tests of a class, for a CPU in `test_cases_rows.py` and for a GPU in `gpu/test_cases_gpu.py`.
Values and both gradients against float64, every dtype.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import calls, cases
from tests.closeness import assert_close
from tests.quantize.quantisers import RECIPES, float64
from tests.reported import Reported

both = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES)


class ReportedNorms(Reported):
    def check(self, op, case, arrays, cotangents, **more):
        """Value and gradients of one call; returns them with the values that are wanted."""
        with self.launches():
            got, gradients = calls.value_and_gradients(
                calls.norm(op, case, **more), arrays, cotangents
            )
            jax.block_until_ready((got, gradients))
        wanted = calls.norm_wanted(op, case, arrays, cotangents)
        for name, gradient in gradients.items():
            assert (gradient.shape, gradient.dtype) == (arrays[name].shape, arrays[name].dtype)
        calls.check_norm(case, got, gradients, wanted)
        return got, gradients, wanted

    @both
    @every_dtype
    def test_case_2_epsilon_does_not_depend_on_dtype(self, rng, op, dtype):
        """A variance of 0.0034 beside an epsilon of 1e-6: with eps(bfloat16) it is 1.7 off."""
        x, dy = (cases.random(rng, (8, 32), dtype, scale) for scale in (0.058, 1.0))
        arrays = {"x": x, "gamma": np.ones(32, x.dtype)}
        y, _, _ = self.check(op, cases.NormCase("", x.shape, epsilon=1e-6), arrays, (dy,))
        size = np.sqrt(np.mean(np.square(float64(y)), -1))
        assert (np.abs(size - 1) < 1e-2).all()

    @both
    @every_dtype
    @pytest.mark.parametrize("value", [300.0, 60000.0])
    def test_case_3_squares_are_summed_in_float32(self, rng, op, dtype, value):
        """4096 squares of 300 overflow float16, as does a single one of 60000."""
        x = np.full((2, 4096), value, cases.DTYPES[dtype])
        x[:, ::2] *= -1  # mean 0: both norms give +-1
        arrays = {"x": x, "gamma": np.ones(4096, x.dtype)}
        dy = cases.random(rng, x.shape, dtype)
        y, _, _ = self.check(op, cases.NormCase("", x.shape), arrays, (dy,))
        np.testing.assert_allclose(float64(y), np.sign(float64(x)), rtol=1e-6)

    @both
    @every_dtype
    @pytest.mark.parametrize("gamma_dtype", ["bfloat16", "float32"])
    def test_case_4_one_is_added_to_gamma_in_float32(self, rng, op, dtype, gamma_dtype):
        """1 + 15.8125 is not a bfloat16: added there it would be 16.75, 0.4 % off in each value."""
        x, dy = (cases.random(rng, (32, 64), dtype) for _ in range(2))
        gamma = np.full(64, 15.8125, cases.DTYPES[gamma_dtype])
        case = cases.NormCase("", x.shape, zero_centered_gamma=True)
        y, _, (value, _) = self.check(op, case, {"x": x, "gamma": gamma}, (dy,))
        if dtype != "float32":
            # Rounded once: the nearest number, unless float32's own error reaches over a midpoint.
            assert (np.asarray(y) != value.y.astype(np.float32).astype(x.dtype)).mean() < 1e-2
        y, _, (value, _) = self.check(op, case, {"x": x, "gamma": 0 * gamma}, (dy,))
        assert_close(y, value.y, reduced=64, what="gamma of zeros is a factor of one")

    @both
    @every_dtype
    def test_case_6_any_number_of_leading_dims(self, rng, op, dtype):
        case = cases.NormCase("", (2, 3, 5, 64), beta=True, add=True, return_input=True)
        arrays, cotangents = calls.norm_arrays(op, case, rng, dtype)
        self.check(op, case, arrays, cotangents)

    @both
    @every_dtype
    @pytest.mark.parametrize("add", [False, True])
    def test_case_7_no_rows(self, op, dtype, add):
        """Nothing is launched, dgamma is zero, and what comes next runs."""
        case = cases.NormCase("", (3, 0, 2520), beta=True, add=add, return_input=add)
        arrays, cotangents = calls.norm_arrays(op, case, np.random.default_rng(0), dtype)
        with self.launches(none=True):
            got, gradients = calls.value_and_gradients(calls.norm(op, case), arrays, cotangents)
            jax.block_until_ready((got, gradients))
        for one in (got, gradients["x"]) if not add else (*got, gradients["x"], gradients["add"]):
            assert (one.shape, one.dtype) == (case.shape, cases.DTYPES[dtype])
        for name in set(gradients) & {"gamma", "beta"}:
            np.testing.assert_array_equal(np.asarray(gradients[name], np.float32), np.zeros(2520))
        assert float(jnp.arange(8.0).sum()) == 28

    @every_dtype
    @pytest.mark.parametrize("length", [1, 3, 7, 1023, 3584, 16384, 65536])
    def test_case_9_any_length_at_any_address(self, rng, length, dtype):
        """Both norms of all rows, and of all but the first: of odd rows those lie anywhere."""
        # At one column an epsilon like the variance keeps dx from being all cancellation.
        case = cases.NormCase("", (5, length), epsilon=0.5 if length == 1 else 1e-6)
        whole, cotangents = calls.norm_arrays("layer_norm", case, rng, dtype)
        programs = {}
        for op in ("layer_norm", "rms_norm"):
            programs[op] = calls.norm(op, case)
            programs[f"{op} of a slice"] = lambda x, gamma, f=programs[op]: f(x=x[1:], gamma=gamma)

        @jax.jit
        def step(arrays, dy):
            out = {}
            for name, f in programs.items():
                y, pull = jax.vjp(lambda arrays, f=f: f(**arrays), arrays)
                out[name] = y, pull(dy[len(dy) - len(y) :])[0]
            return out

        with self.launches():
            got = jax.block_until_ready(step(dict(whole), cotangents[0]))
        for name, (y, gradients) in got.items():
            op, first = name.split()[0], int("slice" in name)
            part = cases.NormCase("", (5 - first, length), epsilon=case.epsilon)
            arrays = {"x": whole["x"][first:], "gamma": whole["gamma"]}
            wanted = calls.norm_wanted(op, part, arrays, (cotangents[0][first:],))
            np.testing.assert_array_equal(float64(gradients["x"])[:first], 0)
            gradients = {"x": gradients["x"][first:], "gamma": gradients["gamma"]}
            if length > 1 or op == "rms_norm":
                calls.check_norm(part, y, gradients, wanted)
            else:  # a value less its mean; of products the rounding may be left
                np.testing.assert_array_equal(float64(y), 0)
                part = np.abs(float64(cotangents[0]) * float64(arrays["gamma"])).max()
                assert np.abs(float64(gradients["x"])).max() <= 1e-6 * part

    @both
    @every_dtype
    @pytest.mark.parametrize("shape", [(128, 256), (160, 96)])
    @pytest.mark.parametrize("recipe", ["mxfp8", "block", "current"])
    def test_case_20_quantised_norm_is_the_quantised_float32_norm(
        self, rng, op, dtype, shape, recipe
    ):
        """Data and scales, in both layouts."""
        case = cases.NormCase("", shape, beta=True, zero_centered_gamma=True)
        arrays, _ = calls.norm_arrays(op, case, rng, dtype)
        quantizer = RECIPES[recipe].quantizer("input", "both")

        @jax.jit
        def step(arrays, quantizer):
            fused = calls.norm(op, case, quantizer=quantizer)(**arrays)
            wide = calls.norm(op, case)(**{**arrays, "x": arrays["x"].astype(jnp.float32)})
            return fused.detach(), so.quantize(wide, quantizer).detach()

        with self.launches():
            fused, apart = jax.block_until_ready(step(dict(arrays), quantizer))
        for one, other in ((fused, apart), (fused.transposed, apart.transposed)):
            self.same_quantised(one, other)

    def same_quantised(self, one, other):
        """On a CPU bit for bit. On a GPU a sum in another order moves a value by a float32 step:
        scales by as much, or where that is a power of two by a factor of two, and few data."""
        data, scales = zip(*((np.asarray(s.data), s.scale_inv) for s in (one, other)), strict=True)
        scales = [float64(scale) for scale in scales if scale is not None]
        if not self.on_gpu:
            np.testing.assert_array_equal(data[0].view(np.uint8), data[1].view(np.uint8))
            for scale in scales[1:]:
                np.testing.assert_array_equal(scales[0], scale)
            return
        ordered = [_codes(array) for array in data]
        if scales:
            alike = np.isclose(*scales, rtol=1e-5, atol=0)
            assert alike.mean() > 0.99
            assert np.isin((scales[0] / scales[1])[~alike], (0.5, 2.0)).all()
        apart = np.abs(ordered[0] - ordered[1])
        assert (apart > 0).mean() < 1e-2
        if not scales or alike.all():
            assert apart.max() <= 1


def _codes(data: np.ndarray) -> np.ndarray:
    """FP8 numbers by their place in the order of all."""
    code = data.view(np.uint8).astype(np.int32)
    return np.where(code < 128, code, 128 - code)
