"""layer_norm and rms_norm on one device: values and gradients against float64, and refusals.

Calls that were reported to fail elsewhere are in tests/reported_norms.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import calls, cases
from tests.closeness import tolerance
from tests.primitives.refusals import refuses

OPS = ("layer_norm", "rms_norm")
both = pytest.mark.parametrize("op", OPS)


def _run(op, case, arrays, cotangents, **options):
    got, gradients = calls.value_and_gradients(calls.norm(op, case, **options), arrays, cotangents)
    return got, gradients, calls.norm_wanted(op, case, arrays, cotangents)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", cases.NORM_CASES + cases.NORM_EMPTY, ids=lambda case: case.id)
@both
def test_norm_value_and_gradients(rng, op, case, dtype):
    arrays, cotangents = calls.norm_arrays(op, case, rng, dtype)
    got, gradients, wanted = _run(op, case, arrays, cotangents)
    for one in got if case.return_input else (got,):
        assert (one.shape, one.dtype) == (case.shape, cases.DTYPES[dtype])
    for name, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (arrays[name].shape, arrays[name].dtype), name
    calls.check_norm(case, got, gradients, wanted)


# --- numerics -----------------------------------------------------------------------------------


def test_layer_norm_of_values_far_from_zero(rng):
    """mean(x^2) - mean(x)^2 would be all rounding here. What is left is that the mean itself, as
    any float32 of that size, is known to eps/2 of it, against a deviation of 1."""
    offset = 1e4
    x = (offset + rng.standard_normal((8, 1024))).astype(np.float32)
    case = cases.NormCase("", x.shape)
    arrays = {"x": x, "gamma": cases.random(rng, (1024,)), "beta": cases.random(rng, (1024,))}
    dy = cases.random(rng, x.shape)
    got, gradients, (value, cotangents) = _run("layer_norm", case, arrays, (dy,))
    limit = 2 * np.finfo(np.float32).eps * offset
    for name, one, want in [
        ("y", got, value.y),
        ("dx", gradients["x"], cotangents.x),
        ("dgamma", gradients["gamma"], cotangents.gamma),
        ("dbeta", gradients["beta"], cotangents.beta),
    ]:
        worst = np.abs(np.asarray(one, np.float64) - want).max() / np.abs(want).max()
        assert worst <= limit, f"{name}: {worst:.3g}, limit {limit:.3g}"


@both
def test_norm_of_a_constant_row(op):
    """Deviation 0: the layer norm gives beta and finite gradients."""
    x = jnp.full((3, 64), 7.25)
    y, vjp = jax.vjp(lambda x: getattr(so, op)(x, jnp.ones(64)), x)
    np.testing.assert_allclose(np.asarray(y), 0 if op == "layer_norm" else 1, atol=1e-6)
    assert np.isfinite(np.asarray(vjp(jnp.ones_like(y))[0])).all()


@both
def test_norm_sums_gradient_of_gamma_in_float32(rng, op):
    """8192 rows of bfloat16: a sum in bfloat16 would stop growing at 256."""
    rows = 8192
    x = np.tile(np.array([[1, -1]], cases.DTYPES["bfloat16"]), (rows, 8))
    case = cases.NormCase("", x.shape)
    arrays = {"x": x, "gamma": np.ones(16, np.float32)}
    dy = np.ones(x.shape, x.dtype)
    _, gradients, _ = _run(op, case, arrays, (dy,))
    np.testing.assert_allclose(
        np.asarray(gradients["gamma"]), np.where(np.arange(16) % 2, -rows, rows), rtol=1e-5
    )


@both
def test_norm_adds_the_residual_cotangent_before_rounding(rng, op):
    """dx of the norm alone is rounded to nothing beside dh: added in float32, it still counts.

    With dh = 256 a bfloat16 keeps steps of 2: rounding dx first and the sum again would be two
    roundings, off by up to one step where one rounding is off by half.
    """
    case = cases.NormCase("", (64, 64), add=True, return_input=True)
    arrays, (dy, _) = calls.norm_arrays(op, case, rng, "bfloat16")
    dh = np.full(case.shape, 256, dy.dtype)
    _, gradients, (_, cotangents) = _run(op, case, arrays, (dy, dh))
    off = np.abs(np.asarray(gradients["x"], np.float64) - cotangents.x)
    step = np.where(cotangents.x < 256, 1.0, 2.0)
    assert (off <= 0.5 * step + 1e-4).all()
    np.testing.assert_array_equal(np.asarray(gradients["x"]), np.asarray(gradients["add"]))


@both
def test_norm_statistics_are_those_of_the_rounded_sum(rng, op):
    """y belongs to the h that is returned: norm(h) gives the same bits as norm(x, add=...)."""
    x, add = (cases.random(rng, (8, 96), "bfloat16") for _ in range(2))
    gamma = cases.random(rng, (96,))
    y, h = jax.jit(functools.partial(getattr(so, op), return_input=True))(x, gamma, add=add)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jax.jit(getattr(so, op))(h, gamma)))


@both
def test_norm_return_input_without_add_returns_x(rng, op):
    x = cases.random(rng, (4, 16), "float16")
    _, h = getattr(so, op)(x, np.ones(16, np.float16), return_input=True)
    np.testing.assert_array_equal(np.asarray(h), x)


@both
def test_norm_keeps_nan_in_its_row(rng, op):
    x = cases.random(rng, (4, 32))
    x[1, 3] = np.nan
    got = np.asarray(getattr(so, op)(x, np.ones(32, np.float32)))
    assert np.isnan(got[1]).all()
    assert np.isfinite(np.delete(got, 1, 0)).all()


@both
@pytest.mark.parametrize("stats", ["auto", "gather", "distributed"])
def test_norm_stats_change_no_value_without_a_mesh(rng, op, stats):
    x, gamma = cases.random(rng, (4, 64)), cases.random(rng, (64,))
    plain, got = getattr(so, op)(x, gamma), getattr(so, op)(x, gamma, stats=stats)
    np.testing.assert_allclose(np.asarray(got), np.asarray(plain), rtol=tolerance("float32", 64))


# --- what they refuse ---------------------------------------------------------------------------


def _of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@both
@pytest.mark.parametrize(
    "error, argument, says, arrays",
    [
        (TypeError, "x", ("int32", "bfloat16"), {"x": _of((4, 8), jnp.int32)}),
        (TypeError, "gamma", ("int32",), {"gamma": _of((8,), jnp.int32)}),
        (ValueError, "gamma", ("(7,)", "(8,)"), {"gamma": _of((7,))}),
        (ValueError, "gamma", ("(1, 8)", "(8,)"), {"gamma": _of((1, 8))}),
        (ValueError, "add", ("(8,)", "(4, 8)"), {"add": _of((8,))}),
        (TypeError, "add", ("bfloat16", "float32"), {"add": _of((4, 8), jnp.bfloat16)}),
        (ValueError, "x", ("()",), {"x": _of(())}),
    ],
)
def test_norm_refuses_array(op, error, argument, says, arrays):
    arrays = {"x": _of((4, 8)), "gamma": _of((8,)), **arrays}

    def f(arrays):
        return getattr(so, op)(**arrays)

    refuses(error, f, arrays, op=op, argument=argument, says=says)


@both
@pytest.mark.parametrize(
    "error, argument, says, options",
    [
        (ValueError, "epsilon", ("-1",), {"epsilon": -1.0}),
        (ValueError, "epsilon", ("1e-300", "float32"), {"epsilon": 1e-300}),
        (ValueError, "epsilon", ("float32",), {"epsilon": 10**400}),
        (ValueError, "epsilon", ("nan",), {"epsilon": float("nan")}),
        (ValueError, "stats", ("'never'", "gather", "distributed"), {"stats": "never"}),
        (TypeError, "quantizer", ("Quantizer",), {"quantizer": object()}),
    ],
)
def test_norm_refuses_option(op, error, argument, says, options):
    def f(x, gamma):
        return getattr(so, op)(x, gamma, **options)

    refuses(error, f, _of((4, 8)), _of((8,)), op=op, argument=argument, says=says)


def test_layer_norm_refuses_beta():
    def f(x, gamma, beta):
        return so.layer_norm(x, gamma, beta)

    shapes = _of((4, 8)), _of((8,))
    refuses(ValueError, f, *shapes, _of((4,)), op="layer_norm", argument="beta", says=("(4,)",))
    refuses(
        TypeError,
        f,
        *shapes,
        _of((8,), jnp.int8),
        op="layer_norm",
        argument="beta",
        says=("int8",),
    )
