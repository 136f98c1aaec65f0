"""What `jax.checkpoint` keeps of a layer: by names, and by the memory of compiled programs."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

import shardops as so
from shardops import checkpoint_policies as policies
from tests.layers.eight_bits import RECIPES

ROWS, D, F = 1024, 128, 512


def mlp(recipe, x, gamma, kernels):
    qs = None if recipe is None else (RECIPES[recipe].dense_quantizers(),) * 2
    return so.layer_norm_mlp(x, gamma, kernels, norm="rms_norm", quantizers=qs)


def operands(layers=(), dtype=jnp.float32):
    return (
        jax.ShapeDtypeStruct((ROWS, D), dtype),
        jax.ShapeDtypeStruct((*layers, D), dtype),
        (
            jax.ShapeDtypeStruct((*layers, D, F), dtype),
            jax.ShapeDtypeStruct((*layers, F, D), dtype),
        ),
    )


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_quantised_layer_keeps_8_bits_its_pre_activation_and_statistics(recipe, capsys):
    """x is an argument. What was normalised, the hidden values and the kernels are kept in the one
    layout that the backward pass reads, and nowhere in 16 bits."""
    print_saved_residuals(partial(mlp, recipe), *operands(dtype=jnp.bfloat16))
    lines = capsys.readouterr().out.splitlines()
    kept = [line.split(" ")[0] for line in lines if "from the argument" not in line]
    scales = {f"f32[{D},{ROWS // 128}]", f"f32[{F},{ROWS // 128}]", "f32[1,4]", "f32[4,1]"}
    assert sorted(k for k in kept if k != "f32[]" and k not in scales) == sorted(
        [
            f"f32[{ROWS}]",
            f"f8_e4m3fn[{D},{ROWS}]",
            f"f8_e4m3fn[{F},{ROWS}]",
            f"f8_e4m3fn[{D},{F}]",
            f"f8_e4m3fn[{F},{D}]",
            f"bf16[{ROWS},{F}]",
        ]
    )
    arguments = [line.split(" ")[0] for line in lines if "from the argument" in line]
    assert sorted(arguments) == [f"bf16[{ROWS},{D}]", f"bf16[{D}]"]


def bytes_of_a_layer(recipe, policy):
    """How much more memory a layer more takes between the passes, its input apart."""

    return slope(recipe, policy) - slope(recipe, None)


@cache
def slope(recipe, policy):
    return (temporaries(recipe, 20, policy) - temporaries(recipe, 12, policy)) / 8


def temporaries(recipe, layers, policy):
    def loss(x, gammas, kernels):
        def layer(x, of_layer):
            return x + mlp(recipe, x, *of_layer), None

        layer = jax.checkpoint(layer, policy=policy)
        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, (gammas, kernels))[0]))

    compiled = jax.jit(jax.grad(loss, (1, 2))).lower(*operands((layers,))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


KERNELS = 3 * D * F  # both layouts of the first, which is multiplied again; one of the second
BYTES = {
    (None, "save_gemms"): ROWS * F * 4,
    (None, "save_norms"): ROWS * D * 4,
    ("current", "save_quantized"): ROWS * (2 * D + F) + KERNELS,
}


@pytest.mark.parametrize(("recipe", "policy"), BYTES)
def test_policies_keep_what_they_name(recipe, policy):
    """Of a product what its activation reads; of operands in 8 bits a byte an element."""
    kept = bytes_of_a_layer(recipe, getattr(policies, policy))
    want = BYTES[recipe, policy]
    assert want <= kept <= want + 128, f"{kept} bytes a layer, {want} named"


def products_of(policy, recipe=None):
    """Products of two layers, in the program before XLA: those of the forward pass are 4."""

    def loss(x, gamma, kernels):
        for _ in range(2):
            layer = jax.checkpoint(partial(mlp, recipe), policy=policy)
            x = jnp.sin(layer(x, gamma, kernels))
        return jnp.sum(x)

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*operands()).compile().as_text()
    return len(re.findall(r" dot\(", text))


@pytest.mark.parametrize("recipe", [None, "current"])
def test_saved_gemms_are_not_multiplied_again(recipe):
    """Case 30: two layers, value and gradient, are 12 products; without a policy more."""
    assert products_of(policies.save_gemms, recipe) == 12
    assert products_of(None, recipe) > 12


def test_gemms_of_layers_have_no_batch_dims():
    assert products_of(policies.save_gemms_without_batch_dims) == 12
