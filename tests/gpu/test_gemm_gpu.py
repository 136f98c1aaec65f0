"""GEMM through cuBLASLt on a GPU: values and gradients of the public functions against float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import references
from tests.closeness import assert_close

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# A tile's worth, odd everywhere, thin, a single element, and more than one tile each way.
SHAPES = ((128, 128, 128), (7, 13, 33), (1, 257, 64), (1, 1, 1), (300, 500, 1000))


def draw(rng: np.random.Generator, shape, dtype):
    return rng.standard_normal(shape, np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("activation, biased", [(None, False), (None, True), ("gelu", True)])
def test_gemm_and_gradient_match_float64(shape, dtype, activation, biased, rng):
    m, n, k = shape
    lhs, rhs, bias = draw(rng, (m, k), dtype), draw(rng, (k, n), dtype), draw(rng, n, dtype)
    # Terms of size one: rounding the result then says nothing about how it was summed.
    lhs = (lhs / np.sqrt(k)).astype(dtype)
    operands = (lhs, rhs, bias) if biased else (lhs, rhs)
    cotangent = draw(rng, (m, n), dtype)

    @jax.jit
    def step(cotangent, *operands):
        def call(lhs, rhs, bias=None):
            return so.gemm(lhs, rhs, bias=bias, activation=activation)

        result, pull = jax.vjp(call, *operands)
        return result, pull(cotangent)

    out, gradients = step(cotangent, *operands)
    options = {"bias": bias if biased else None, "activation": activation}
    assert_close(out, references.gemm_reference(lhs, rhs, **options), reduced=k, what="result")
    want = references.gemm_vjp_reference(cotangent, lhs, rhs, **options)
    # The cotangent of the pre-activation, itself from a rounded one, is rounded on the way.
    for name, got, reduced in zip(("lhs", "rhs", "bias"), gradients, (n, m, m), strict=False):
        assert_close(got, getattr(want, name), reduced=reduced, roundings=4, what=f"d{name}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_adds_into_an_accumulator(dtype, rng):
    lhs, rhs, add = (draw(rng, (96, 96), dtype) for _ in range(3))
    out = jax.jit(lambda lhs, rhs, add: so.gemm(lhs, rhs, add=add))(lhs, rhs, add)
    assert_close(out, references.gemm_reference(lhs, rhs, add=add), reduced=96, what="result")


def test_float32_stays_float32_unless_asked(rng):
    lhs, rhs = draw(rng, (256, 512), jnp.float32), draw(rng, (512, 256), jnp.float32)
    assert_close(so.gemm(lhs, rhs), references.gemm_reference(lhs, rhs), reduced=512)
    with jax.default_matmul_precision("tensorfloat32"):
        fast = so.gemm(lhs, rhs)
    with pytest.raises(AssertionError):  # ten bits of mantissa: were it float32, this would hold
        assert_close(fast, references.gemm_reference(lhs, rhs), reduced=512)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_dot_general_takes_dims_in_any_order(order, rng):
    """A batch dim, a free one and a contracted one, in each order of the left operand."""
    place = [order.index(dim) for dim in range(3)]
    lhs = draw(rng, [(3, 40, 24)[dim] for dim in order], jnp.bfloat16)
    rhs = draw(rng, (24, 3, 56), jnp.bfloat16)
    numbers = (((place[2],), (0,)), ((place[0],), (1,)))
    out = jax.jit(lambda lhs, rhs: so.dot_general(lhs, rhs, numbers))(lhs, rhs)
    assert_close(out, references.dot_general_reference(lhs, rhs, numbers), reduced=24)
