"""What is said of a norm's results without tracing it is what a trace of the reference says."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from shardops.primitives import norm_local


def of(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("beta", [False, True])
def test_results_are_those_of_the_reference(dtype, kind, add, beta):
    x, gamma, rows = of((2, 3, 8), dtype), of((8,), jnp.float16), of((2, 3), jnp.float32)
    for wide in (False, True):
        operands = [x, gamma, *[gamma] * beta, *[x] * add]
        statics = {"kind": kind, "add": add, "beta": beta, "epsilon": 1e-6, "wide": wide}
        statics["zero_centered_gamma"] = False
        traced = jax.eval_shape(partial(norm_local.forward_reference, **statics), *operands)
        assert norm_local._forward_results(*operands, **statics) == traced
    operands = [x, x, gamma, *[rows] * (2 if kind == "layer" else 1), *[x] * add]
    statics = {"kind": kind, "residual": add, "beta": beta, "zero_centered_gamma": False}
    traced = jax.eval_shape(partial(norm_local.backward_reference, **statics), *operands)
    assert norm_local._backward_results(*operands, **statics) == traced
