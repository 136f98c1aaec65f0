"""softmax on one device: values and gradients against float64, numerics, and refusals.

Calls that were reported to fail elsewhere are in tests/reported_softmax.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardops.primitives.softmax import softmax
from tests import calls, cases
from tests.primitives import test_softmax_reference as oracle
from tests.primitives.refusals import refuses


def value_and_gradient(case, arrays, dy):
    """y and dx, in one compiled program."""
    x, rest = arrays["x"], {n: a for n, a in arrays.items() if n != "x"}

    def f(x):
        return softmax(x, **rest, **case.options)

    got, gradients = calls.value_and_gradients(f, {"x": x}, (dy,))
    return got, gradients["x"]


def check(case, rng, dtype):
    arrays, dy = case.arrays(rng, dtype), cases.random(rng, case.shape, dtype)
    got, dx = value_and_gradient(case, arrays, dy)
    assert got.dtype == dx.dtype == cases.DTYPES[dtype]
    oracle.check(case, got, dx, arrays, dy)


every_dtype = pytest.mark.parametrize("dtype", cases.DTYPES)


@every_dtype
@pytest.mark.parametrize("case", oracle.CASES + oracle.EMPTY, ids=lambda case: case.id)
def test_softmax_value_and_gradient(rng, case, dtype):
    check(case, rng, dtype)


# --- masks --------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_of_values_that_are_not_finite(rng, value, masked, dtype):
    """Seen they act as in jax.nn.softmax, in their row alone; masked they do not act."""
    x = cases.random(rng, (4, 16), dtype)
    x[1, 3] = value
    mask = np.zeros(x.shape, bool)
    mask[1, 3], mask[:, 7] = masked, True
    got = np.asarray(softmax(x, mask=mask), np.float32)
    wide = jnp.asarray(x, jnp.float32)
    want = np.asarray(jax.nn.softmax(wide, where=~mask))
    if masked:
        want = oracle.softmax_reference(np.where(mask, 0, x), mask)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(got[1]).any() == (not masked and value != -np.inf)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-6)
    plain = np.asarray(softmax(x), np.float32)
    np.testing.assert_allclose(plain, np.asarray(jax.nn.softmax(wide)), rtol=1e-2, atol=1e-6)


def test_softmax_of_minus_infinity_everywhere_is_nan_where_it_is_seen():
    x, mask = jnp.full((2, 4), -jnp.inf), np.array([[False] * 4, [True] * 4])
    got = np.asarray(softmax(x, mask=mask))
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1], 0)


# --- accuracy -----------------------------------------------------------------------------------


@every_dtype
def test_softmax_of_large_logits(rng, dtype):
    """60000 would overflow exp, and times the scale float16."""
    x = np.full((2, 8), 60000, cases.DTYPES[dtype])
    np.testing.assert_array_equal(np.asarray(softmax(x, scale=4.0), np.float32), 1 / 8)
    x[0, 0] = -60000
    want = [[0, *[1 / 7] * 7], [1 / 8] * 8]
    np.testing.assert_allclose(np.asarray(softmax(x), np.float32), want, rtol=4e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softmax_rounds_once(rng, dtype):
    """The nearest value of the dtype, but where float32's own error reaches over a midpoint."""
    x = cases.random(rng, (64, 64), dtype, 3.0)
    got = np.asarray(softmax(x, scale=0.3))
    want = oracle.softmax_reference(x, scale=0.3)
    nearest = want.astype(np.float32).astype(got.dtype)
    assert (got != nearest).mean() < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softmax_sums_in_float32(dtype):
    """2^15 equal keys: summed in bfloat16 they would stop at 256."""
    got = np.asarray(softmax(jnp.zeros((1, 2**15), dtype)), np.float64)
    np.testing.assert_array_equal(got, 2.0**-15)


def test_softmax_gradient_is_taken_from_the_saved_result(rng):
    """Nothing else of the forward is kept: y, in the dtype of x."""
    x = jnp.asarray(cases.random(rng, (4, 8, 16), "bfloat16"))
    _, pull = jax.vjp(lambda x: softmax(x, scale=0.5, causal="upper_left"), x)
    kept = [a for a in jax.tree.leaves(pull) if hasattr(a, "size") and a.size > 1]
    assert [(a.shape, a.dtype.name) for a in kept] == [((4, 8, 16), "bfloat16")]


# --- what it refuses ----------------------------------------------------------------------------


def _of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "error, argument, says, x, options",
    [
        (TypeError, "x", ("int32", "bfloat16"), _of((4, 8), jnp.int32), {}),
        (TypeError, "x", ("float8_e4m3fn",), _of((4, 8), jnp.float8_e4m3fn), {}),
        (ValueError, "x", ("()", "k"), _of(()), {}),
        (ValueError, "x", ("(8,)", "queries"), _of((8,)), {"causal": "upper_left"}),
        (ValueError, "x", ("2147483648", "2^31"), _of((2**31, 1)), {"causal": "bottom_right"}),
        (ValueError, "causal", ("True", "'upper_left'"), _of((4, 8)), {"causal": True}),
        (ValueError, "causal", ("'top_left'",), _of((4, 8)), {"causal": "top_left"}),
        (TypeError, "scale", ("str", "number"), _of((4, 8)), {"scale": "1"}),
        (TypeError, "scale", ("bool",), _of((4, 8)), {"scale": True}),
        (TypeError, "scale", ("static",), _of((4, 8)), {"scale": np.ones(1)}),
        (ValueError, "scale", ("nan",), _of((4, 8)), {"scale": float("nan")}),
        (ValueError, "scale", ("inf",), _of((4, 8)), {"scale": float("inf")}),
        (ValueError, "scale", ("1e+39",), _of((4, 8)), {"scale": 1e39}),
        (ValueError, "scale", ("1e-40", "1.175e-38"), _of((4, 8)), {"scale": 1e-40}),
        (TypeError, "mask", ("float32", "bool"), _of((4, 8)), {"mask": np.ones(8, np.float32)}),
        (TypeError, "mask", ("int32",), _of((4, 8)), {"mask": np.ones(8, np.int32)}),
        (TypeError, "mask", ("list",), _of((4, 8)), {"mask": [True] * 8}),
        (ValueError, "mask", ("(4,)", "(4, 8)"), _of((4, 8)), {"mask": np.ones(4, bool)}),
        (ValueError, "mask", ("(1, 4, 8)",), _of((4, 8)), {"mask": np.ones((1, 4, 8), bool)}),
    ],
)
def test_softmax_refuses(error, argument, says, x, options):
    def f(x):
        return softmax(x, **options)

    refuses(error, f, x, op="softmax", argument=argument, says=says)


def test_softmax_refuses_what_is_no_array():
    with pytest.raises(TypeError, match=r"softmax: x is a list; expected an array\."):
        softmax([1.0, 2.0])  # pyright: ignore[reportArgumentType]


def test_softmax_refuses_a_traced_scale():
    def f(x, scale):
        return softmax(x, scale=scale)

    refuses(TypeError, f, _of((4, 8)), _of(()), op="softmax", argument="scale", says=("static",))


@pytest.mark.parametrize("scale", [2, np.float32(0.5), np.int64(3), np.float64(0.25)])
def test_softmax_takes_any_number_as_scale(rng, scale):
    x = cases.random(rng, (4, 8))
    want = oracle.softmax_reference(x, scale=float(scale))
    np.testing.assert_allclose(np.asarray(softmax(x, scale=scale)), want, rtol=1e-5, atol=1e-7)
