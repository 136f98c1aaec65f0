"""What layers one after the other keep between the passes, by the memory of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

import shardops as so

ROWS, D, F = 512, 64, 512
INPUTS = 0.5  # more than the input, the normalised input and statistics, of D features


def layer(x, gamma, kernels, activation):
    return so.layer_norm_mlp(x, gamma, kernels, norm="rms_norm", activation=activation)


def products(x, gamma, kernels, activation):
    hidden = so.gemm(so.rms_norm(x, gamma), kernels[0], activation=activation)
    return so.gemm(hidden, kernels[1])


def temporaries(block, layers, activation):
    pair = (2,) * isinstance(activation, tuple)
    vector, up, down = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((D,), (D, *pair, F), (F, D))
    )

    def loss(x, parameters):
        for gamma, kernels in parameters:
            x = x + block(x, gamma, kernels, activation)
        return jnp.sum(jnp.sin(x))

    program = jax.jit(jax.grad(loss, 1)).lower(
        jax.ShapeDtypeStruct((ROWS, D), jnp.float32), [(vector, (up, down))] * layers
    )
    return program.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("block", "activation"),
    [(layer, "gelu"), (layer, "silu"), (products, "gelu"), (products, "silu")],
)
def test_nothing_is_kept_of_an_activation_but_operand_and_result(block, activation):
    """In one program XLA finds what both passes compute of the pre-activation, and would keep it.

    Gates: `tests/gpu/test_layers_gpu.py`; XLA for CPUs computes a part of their gradient early."""
    assert kept(block, activation) <= 2 + INPUTS


def kept(block, activation):
    """What a layer more keeps, in arrays of all rows and F features."""
    return (temporaries(block, 8, activation) - temporaries(block, 4, activation)) / (
        4 * 4 * ROWS * F
    )
