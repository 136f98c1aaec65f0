"""gemm on one device: values and gradients against float64, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import calls, cases
from tests.closeness import assert_close
from tests.primitives.refusals import refuses

ALL = cases.GEMM_SHAPES + cases.GEMM_EMPTY + cases.GEMM_EPILOGUES


def by_id(case):
    return case.id


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", ALL, ids=by_id)
def test_gemm_value_and_gradients(rng, case, dtype):
    arrays = calls.gemm_arrays(case, rng, dtype)
    out_dtype = case.out_dtype or dtype
    cotangent = cases.random(rng, case.lhs_free + case.rhs_free, out_dtype)
    got, gradients = calls.value_and_gradients(calls.gemm(case), arrays, (cotangent,))
    assert got.dtype == cases.DTYPES[out_dtype]
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype, name
        assert gradient.shape == arrays[name].shape, name
    calls.check_gemm(case, got, gradients, calls.gemm_wanted(case, arrays, cotangent))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gemm_accumulates_in_float32(rng, dtype):
    """4096 ones and a large head: a running sum in the operands' dtype would stand still."""
    lhs = np.ones((2, 4096), cases.DTYPES[dtype])
    lhs[:, 0] = 512
    got = so.gemm(lhs, np.ones((4096, 3), cases.DTYPES[dtype]), out_dtype="float32")
    np.testing.assert_array_equal(np.asarray(got), np.full((2, 3), 512 + 4095, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gemm_rounds_once_after_bias(dtype):
    """The sum is 2048 + 1/4, which neither dtype can hold, and the bias takes the 2048 away."""
    lhs = np.array([[2048, 0.25]], cases.DTYPES[dtype])
    rhs = np.ones((2, 1), cases.DTYPES[dtype])
    got = so.gemm(lhs, rhs, bias=np.array([-2048], cases.DTYPES[dtype]))
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), [[0.25]])


@pytest.mark.parametrize("bias_dtype", cases.DTYPES)
def test_gemm_bias_of_another_dtype(rng, bias_dtype):
    case = cases.GemmCase("", (6, 16), (16, 8), bias=True, activation="gelu")
    arrays = calls.gemm_arrays(case, rng, "bfloat16")
    arrays["bias"] = cases.random(rng, (8,), bias_dtype)
    cotangent = cases.random(rng, (6, 8), "bfloat16")
    got, gradients = calls.value_and_gradients(calls.gemm(case), arrays, (cotangent,))
    assert got.dtype == jnp.bfloat16
    assert gradients["bias"].dtype == cases.DTYPES[bias_dtype]
    wanted = calls.gemm_wanted(case, arrays, cotangent)
    # what it sums was rounded to the result's dtype, the sum itself to the bias's
    bias = gradients.pop("bias")
    assert_close(bias, wanted[1].bias, dtype="bfloat16", reduced=22, roundings=5, what="bias")
    calls.check_gemm(case, got, gradients, wanted)


@pytest.mark.parametrize("lhs_dtype, rhs_dtype", [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_gemm_promotes_operands_of_two_dtypes(rng, lhs_dtype, rhs_dtype):
    """Both pairs become float32, as jnp has it; each gradient has its operand's dtype."""
    case = cases.GemmCase("", (6, 16), (16, 8))
    arrays = {"lhs": cases.random(rng, (6, 16), lhs_dtype)}
    arrays["rhs"] = cases.random(rng, (16, 8), rhs_dtype)
    cotangent = cases.random(rng, (6, 8))
    got, gradients = calls.value_and_gradients(calls.gemm(case), arrays, (cotangent,))
    assert got.dtype == jnp.float32
    assert all(gradients[name].dtype == arrays[name].dtype for name in arrays)
    calls.check_gemm(case, got, gradients, calls.gemm_wanted(case, arrays, cotangent))


@pytest.mark.parametrize("size, other", [(1e6, 1e-3), (1e-8, 1e4)])
def test_gemm_gradients_take_cotangents_beyond_float16(rng, size, other):
    """Both gradients fit in float16, the cotangent between them does not: as precise as jnp."""
    x, w = (np.float16(other) * cases.random(rng, s, "float16") for s in ((6, 16), (16, 8)))
    dy = np.float32(size) * cases.random(rng, (6, 8))

    def errors(product):
        _, pull = jax.vjp(product, x, w)
        wide = [a.astype(np.float64) for a in (x, w)]
        wanted = dy @ wide[1].T, wide[0].T @ dy
        found = [np.asarray(d).astype(np.float64) for d in pull(dy)]
        return [np.abs(d - want).max() for d, want in zip(found, wanted, strict=True)], wanted

    ours, wanted = errors(lambda x, w: so.gemm(x, w, out_dtype=jnp.float32))
    theirs, _ = errors(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))
    for error, other, want in zip(ours, theirs, wanted, strict=True):
        assert error <= other + 2.0**-12 * np.abs(want).max()


def test_gemm_accumulates_gradients_into_add(rng):
    """The use of add: one microbatch's weight gradient on top of the others', in float32."""
    total = jnp.zeros((16, 24), jnp.float32)
    want = np.zeros((16, 24))
    for _ in range(3):
        x = cases.random(rng, (4, 8, 16), "bfloat16")
        dy = cases.random(rng, (4, 8, 24), "bfloat16")
        total = so.gemm(
            x,
            dy,
            contracting_dims=((0, 1), (0, 1)),
            batch_dims=((0, 1), (0, 1)),
            add=total,
            out_dtype=jnp.float32,
        )
        want += np.einsum("bsk,bsn->kn", x.astype(np.float64), dy.astype(np.float64))
    assert_close(total, want, reduced=3 * 32)


def test_gemm_batch_dims_change_no_value(rng):
    x, w = cases.random(rng, (4, 8, 16)), cases.random(rng, (16, 24))
    plain, batched = so.gemm(x, w), so.gemm(x, w, batch_dims=((0, 1), ()))
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(batched))


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_gemm_activation_far_from_zero_is_finite(activation):
    """Large pre-activations of both signs: the slope saturates, it does not become NaN."""
    x = np.array([[-1e4], [-50.0], [0.5], [50.0], [1e4]], np.float32)
    w = np.ones((1, 1), np.float32)
    case = cases.GemmCase("", x.shape, w.shape, activation=activation)
    got, gradients = calls.value_and_gradients(
        calls.gemm(case), {"lhs": x, "rhs": w}, (np.ones((5, 1), np.float32),)
    )
    assert np.isfinite(np.asarray(got)).all()
    slopes = np.asarray(gradients["lhs"])[:, 0]
    np.testing.assert_allclose(slopes[[0, 1, 3, 4]], [0, 0, 1, 1], atol=1e-6)


def test_gemm_propagates_nan_and_infinity():
    x = np.array([[np.nan, 1.0], [np.inf, 1.0], [2.0, 1.0]], np.float32)
    got = np.asarray(so.gemm(x, np.ones((2, 1), np.float32)))[:, 0]
    assert np.isnan(got[0])
    assert np.isposinf(got[1])
    assert got[2] == 3


@pytest.mark.parametrize("out_sharding", [None, "cheapest"])
def test_gemm_needs_no_mesh(rng, out_sharding):
    x, w = cases.random(rng, (4, 8)), cases.random(rng, (8, 3))
    got = so.gemm(x, w, out_sharding=out_sharding)
    assert_close(got, x.astype(np.float64) @ w.astype(np.float64), reduced=8)


# --- what it refuses --------------------------------------------------------------------------


def _of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = _of((4, 8)), _of((8, 3))


@pytest.mark.parametrize("argument", ["lhs", "rhs"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn, jnp.complex64, jnp.bool_])
def test_gemm_refuses_dtype(argument, dtype):
    shapes = {"lhs": X, "rhs": W, argument: _of({"lhs": X, "rhs": W}[argument].shape, dtype)}
    refuses(
        TypeError,
        so.gemm,
        shapes["lhs"],
        shapes["rhs"],
        op="gemm",
        argument=argument,
        says=(jnp.dtype(dtype).name, "float32", "bfloat16", "float16"),
    )


@pytest.mark.parametrize(
    "error, argument, says, options",
    [
        (ValueError, "contracting_dims", ("2",), {"contracting_dims": ((2,), (0,))}),
        (ValueError, "contracting_dims", ("-3",), {"contracting_dims": ((-1,), (-3,))}),
        (ValueError, "contracting_dims", (), {"contracting_dims": ((0, 1), (0,))}),
        (ValueError, "contracting_dims", (), {"contracting_dims": ((1, -1), (0, 0))}),
        (ValueError, "batch_dims", ("5",), {"batch_dims": ((5,), ())}),
        (ValueError, "activation", ("'swish'", "gelu", "silu", "relu"), {"activation": "swish"}),
        (TypeError, "out_dtype", ("int8",), {"out_dtype": jnp.int8}),
        (ValueError, "bias", ("(4,)", "(3,)"), {"bias": jnp.zeros(4)}),
        (TypeError, "bias", ("int32",), {"bias": jnp.zeros(3, jnp.int32)}),
        (ValueError, "add", ("(3,)", "(4, 3)"), {"add": jnp.zeros(3)}),
        (TypeError, "add", ("int32",), {"add": jnp.zeros((4, 3), jnp.int32)}),
        (ValueError, "out_sharding", ("'best'", "cheapest"), {"out_sharding": "best"}),
        (ValueError, "out_sharding", (), {"out_sharding": jax.P(None, None, "tp")}),
    ],
)
def test_gemm_refuses(error, argument, says, options):
    def f(lhs, rhs):
        return so.gemm(lhs, rhs, **options)

    refuses(error, f, X, W, op="gemm", argument=argument, says=says)


def test_gemm_refuses_sizes_that_differ():
    with pytest.raises(ValueError, match=r"^gemm: .+8.+7.*; expected .+\. .+\.(\n|$)"):
        jax.eval_shape(so.gemm, X, _of((7, 3)))


def test_gemm_error_is_raised_while_tracing():
    """Before XLA sees anything: jit's trace alone raises it."""
    with pytest.raises(ValueError, match="gemm: "):
        jax.jit(so.gemm).trace(X, _of((7, 3)))
