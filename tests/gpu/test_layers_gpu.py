"""Dense layers on a GPU: 8-bit products in both passes, and what they compute."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.kernels.target import current_target
from tests import cases
from tests.closeness import assert_close
from tests.layers import eight_bits
from tests.layers import test_activation_memory as memory

ROWS, K, N = 512, 384, 640
HOPPER = ("delayed", "current", "block")


@pytest.fixture(autouse=True)
def _hopper():
    if current_target().arch != "sm_90":
        pytest.skip("these products are Hopper's")


def program(qs):
    def run(x, kernel, dz):
        def f(x, kernel):
            return so.dense(x, kernel, quantizers=so.recipes.watch(qs), precise_accumulation=True)

        y, pull = jax.vjp(f, x, kernel)
        return y, *pull(dz)

    return jax.jit(run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", HOPPER)
def test_dense_multiplies_in_8_bits_in_both_passes(rng, recipe, dtype):
    """Sums on the tensor cores of Hopper are as good as those in float16."""
    shapes = (((ROWS, K), 1), ((K, N), 0.1), ((ROWS, N), 1e-2))
    x, kernel, dz = (cases.random(rng, shape, dtype, scale) for shape, scale in shapes)
    qs = eight_bits.quantizers(recipe, x, kernel, dz)
    run = program(qs)
    text = run.lower(x, kernel, dz).compile().as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="shardops_gemm"' in line]
    assert len(calls) == 3
    assert all("f8e4m3fn" in call for call in calls)
    assert sum("f8e5m2" in call for call in calls) == 2
    assert not re.search(r"transpose\(f8|f32\[384,512\]|bf16\[384,512\]", text)
    got = run(x, kernel, dz)
    want = eight_bits.dense_and_vjp(x, kernel, dz, qs)
    for one, other, reduced in zip(got, want, (K, N, ROWS), strict=True):
        narrow = np.float16 if dtype == "float32" else dtype
        assert_close(one, other, reduced=reduced, dtype=narrow, roundings=2)


@pytest.mark.parametrize("recipe", HOPPER)
@pytest.mark.parametrize("activation", ["gelu", ("silu", "linear")])
def test_mlp_by_kernels_is_that_by_jnp(rng, recipe, activation):
    """Other last bits of the norm and of sums put some numbers on the next of a format: less than
    the rounding of a number in ten. Both are as far from no rounding as that puts them."""
    pair = (2,) * isinstance(activation, tuple)
    arrays = [
        cases.random(rng, shape, "bfloat16", scale)
        for shape, scale in (
            ((4, 128, K), 1),
            ((K,), 1),
            ((K, *pair, N), K**-0.5),
            ((N, K), N**-0.5),
            ((4, 128, K), 1),
        )
    ]

    def run(qs, x, gamma, up, down, dy):
        def f(x, gamma, up, down):
            return so.layer_norm_mlp(
                x,
                gamma,
                (up, down),
                norm="rms_norm",
                activation=activation,
                quantizers=qs and so.recipes.watch(qs),
                precise_accumulation=qs is not None,
            )

        y, pull = jax.vjp(f, x, gamma, up, down)
        return y, *pull(dy)

    qs = (eight_bits.RECIPES[recipe].dense_quantizers(),) * 2
    kernels = jax.jit(run)(qs, *arrays)
    with so.use_kernels(""), jax.default_matmul_precision("float32"):
        in_jnp = jax.jit(run)(qs, *arrays)
        exact = jax.jit(run)(None, *(a.astype(jnp.float32) for a in arrays))
    for got, want, true in zip(kernels, in_jnp, exact, strict=True):
        assert apart(got, want) <= eight_bits.E5M2 * 0.1**0.5
        assert min(apart(got, true), apart(want, true)) >= eight_bits.E4M3


@pytest.mark.parametrize("activation", ["gelu", ("silu", "linear"), ("gelu", "linear")])
def test_an_mlp_keeps_nothing_of_its_activation_but_operand_and_result(activation):
    arrays = 3 if isinstance(activation, tuple) else 2
    assert memory.kept(memory.layer, activation) <= arrays + memory.INPUTS


def apart(one, other):
    one, other = (np.asarray(a, np.float64) for a in (one, other))
    return np.linalg.norm(one - other) / np.linalg.norm(other)
