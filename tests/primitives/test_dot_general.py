"""dot_general as a drop-in for jax.lax.dot_general: true batch dims, any dims, its keywords."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import calls, cases, references
from tests.closeness import assert_close
from tests.primitives.refusals import refuses


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", cases.DOT_CASES, ids=lambda case: case.id)
def test_dot_general_value_and_gradients(rng, case, dtype):
    lhs = cases.random(rng, case.lhs, dtype)
    rhs = cases.random(rng, case.rhs, dtype)
    want = references.dot_general_reference(lhs, rhs, case.numbers)
    cotangent = cases.random(rng, want.shape, dtype)

    def f(lhs, rhs):
        return so.dot_general(lhs, rhs, case.numbers)

    got, gradients = calls.value_and_gradients(f, {"lhs": lhs, "rhs": rhs}, (cotangent,))
    assert got.dtype == lhs.dtype
    assert_close(got, want, reduced=case.reduced)
    wanted = references.dot_general_vjp_reference(cotangent, lhs, rhs, case.numbers)
    for name, one in zip(("lhs", "rhs"), wanted, strict=True):
        assert gradients[name].dtype == cases.DTYPES[dtype]
        assert_close(gradients[name], one, reduced=want.size, what=name)


@pytest.mark.parametrize("case", cases.DOT_CASES, ids=lambda case: case.id)
def test_dot_general_has_the_type_of_lax(case):
    lhs, rhs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (case.lhs, case.rhs))
    for preferred in (None, jnp.float32):

        def f(function, preferred=preferred):
            return jax.eval_shape(
                lambda a, b: function(a, b, case.numbers, None, preferred), lhs, rhs
            )

        assert f(so.dot_general) == f(jax.lax.dot_general)


@pytest.mark.parametrize("preferred", ["float32", "bfloat16"])
def test_dot_general_preferred_element_type(rng, preferred):
    case = cases.DOT_CASES[2]
    lhs, rhs = (cases.random(rng, s, "bfloat16") for s in (case.lhs, case.rhs))

    def f(lhs, rhs):
        return so.dot_general(
            lhs, rhs, case.numbers, preferred_element_type=cases.DTYPES[preferred]
        )

    want = references.dot_general_reference(lhs, rhs, case.numbers)
    cotangent = cases.random(rng, want.shape, preferred)
    got, gradients = calls.value_and_gradients(f, {"lhs": lhs, "rhs": rhs}, (cotangent,))
    assert got.dtype == cases.DTYPES[preferred]
    assert_close(got, want, reduced=case.reduced)
    wanted = references.dot_general_vjp_reference(cotangent, lhs, rhs, case.numbers)
    for name, one in zip(("lhs", "rhs"), wanted, strict=True):
        assert_close(gradients[name], one, reduced=want.size, roundings=2, what=name)


@pytest.mark.parametrize("precision", [None, "highest", jax.lax.Precision.DEFAULT])
def test_dot_general_takes_precision(rng, precision):
    lhs, rhs = cases.random(rng, (5, 7)), cases.random(rng, (7, 3))
    got = so.dot_general(lhs, rhs, (((1,), (0,)), ((), ())), precision)
    assert_close(got, lhs.astype(np.float64) @ rhs.astype(np.float64), reduced=7)


def test_dot_general_takes_lists(rng):
    lhs, rhs = cases.random(rng, (4, 5, 7)), cases.random(rng, (4, 7, 3))
    got = so.dot_general(lhs, rhs, [[[2], [1]], [[0], [0]]])
    assert_close(got, np.einsum("bmk,bkn->bmn", lhs, rhs), reduced=7)


def test_dot_general_in_flax(rng):
    """As Flax's dot_general=, which passes it what Flax passes lax's."""
    flax = pytest.importorskip("flax", reason="flax is not installed: the flax extra has it")
    from flax import linen, nnx

    del flax
    x = cases.random(rng, (2, 5, 8))
    layer = nnx.Linear(8, 3, dot_general=so.dot_general, rngs=nnx.Rngs(0))
    want = x.astype(np.float64) @ np.asarray(layer.kernel[...], np.float64)
    assert_close(layer(x), want, reduced=8)

    dense = linen.DenseGeneral((3, 2), axis=(-2, -1), dot_general=so.dot_general, use_bias=False)
    variables = dense.init(jax.random.key(0), x)
    kernel = np.asarray(variables["params"]["kernel"], np.float64)
    want = np.einsum("bsk,sknm->bnm", x.astype(np.float64), kernel)
    assert_close(dense.apply(variables, x), want, reduced=40)


@pytest.mark.parametrize(
    "numbers",
    [
        (((2,), (2,)), ((0,), (0,))),  # 7 against 3
        (((2,), (1,)), ((1,), (0,))),  # batch 5 against 4
        (((2,), (1,)), ((2,), (0,))),  # contracted and batch
        (((2, 2), (1, 1)), ((), ())),  # twice
        (((3,), (1,)), ((0,), (0,))),  # no such dim
        (((2,), ()), ((), ())),  # not paired
    ],
)
def test_dot_general_refuses_dims(numbers):
    lhs, rhs = jax.ShapeDtypeStruct((4, 5, 7), jnp.float32), jnp.zeros((4, 7, 3))
    with pytest.raises(ValueError, match=r"^dot_general: .+; expected .+\. .+\.(\n|$)"):
        jax.eval_shape(lambda a: so.dot_general(a, rhs, numbers), lhs)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.complex64])
def test_dot_general_of_other_dtypes_is_that_of_lax(dtype):
    """A drop-in stays one where no kernel is made for the dtype."""
    lhs, rhs = jnp.arange(12).reshape(3, 4).astype(dtype), jnp.arange(8).reshape(4, 2).astype(dtype)
    numbers = (((1,), (0,)), ((), ()))
    got, want = so.dot_general(lhs, rhs, numbers), jax.lax.dot_general(lhs, rhs, numbers)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("numbers", [None, 3, (((1,), (0,)),)])
def test_dot_general_refuses_what_are_no_dimension_numbers(numbers):
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    refuses(
        TypeError,
        lambda a, b: so.dot_general(a, b, numbers),
        shape,
        shape,
        op="dot_general",
        argument="dimension_numbers",
    )
