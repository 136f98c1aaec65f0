"""dot_general where jax.lax.dot_general is what people know: the same results for odd operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes

MATMUL = (((1,), (0,)), ((), ()))
X, W = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("lhs", "rhs", "options"),
    [
        (X.astype(int), W.astype(int), {}),
        (X.astype(complex), W.astype(complex), {}),
        (X.astype(jnp.bfloat16), W.astype(jnp.float16), {}),
        (X.astype(jnp.bfloat16), W, {"preferred_element_type": jnp.float32}),
        (X, W, {"precision": "F32_F32_F32"}),
        (X, W, {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32}),
        (X, W, {"precision": ("high", "default")}),
        (X, W, {"precision": jax.lax.Precision.HIGHEST}),
        (np.asarray(X), np.asarray(W), {}),
    ],
)
def test_dot_general_gives_what_lax_gives(lhs, rhs, options):
    got = so.dot_general(lhs, rhs, MATMUL, **options)
    want = jax.lax.dot_general(lhs, rhs, MATMUL, **options)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(got, complex), np.asarray(want, complex), rtol=1e-2)


def test_dot_general_of_python_scalars():
    assert so.dot_general(2.0, 3.0, (((), ()), ((), ()))) == 6


def test_dot_general_of_integers_takes_an_out_sharding(auto_mesh):
    x = meshes.place(auto_mesh, jnp.ones((8, 8), int))
    got = jax.jit(lambda x: so.dot_general(x, x, MATMUL, out_sharding=P("dp")))(x)
    assert got.sharding.spec[0] == "dp"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: so.gemm(None, W), TypeError, "gemm: lhs is a NoneType"),
        (lambda: so.dot_general("a", W, MATMUL), TypeError, "dot_general: lhs is a str"),
        (lambda: so.rms_norm(X, None), TypeError, "rms_norm: gamma is a NoneType"),
        (
            lambda: so.rms_norm(X, X[0], return_input="no"),
            TypeError,
            "rms_norm: return_input is a str",
        ),
        (
            lambda: so.layer_norm(X, X[0], zero_centered_gamma=X),
            TypeError,
            "layer_norm: zero_centered_gamma is a ",
        ),
        (
            lambda: so.gemm(X, W, precise_accumulation="no"),
            TypeError,
            "gemm: precise_accumulation is a str",
        ),
        (lambda: so.gemm(X, W, out_sharding=P("a", "a")), ValueError, "axis names, each once"),
        (lambda: so.gemm(X, W, out_sharding=P(3)), ValueError, "axis names, each once"),
        (
            lambda: so.gemm(X, W, out_sharding=P(None, unreduced={"a"})),
            ValueError,
            "expected unreduced axes of the mesh, (). Rename 'a'.",
        ),
        (
            lambda: so.dot_general(X, W, MATMUL, precision="bogus"),
            ValueError,
            "dot_general: precision is 'bogus'",
        ),
        (
            lambda: so.dot_general(X, W, MATMUL, preferred_element_type="bogus"),
            TypeError,
            "dot_general: preferred_element_type is 'bogus'",
        ),
    ],
)
def test_refusals_name_op_argument_and_value(call, error, said):
    with pytest.raises(error) as raised:
        jax.jit(call)()
    assert said in str(raised.value)
