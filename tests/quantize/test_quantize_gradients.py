"""Straight-through: the cotangent of what is dequantised is that of the array, at every order."""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import cases, meshes
from tests.quantize.quantisers import LAYOUTS, RECIPES, bits, wide_range

each_recipe = pytest.mark.parametrize("name", RECIPES)


@each_recipe
def test_cotangent_passes_as_it_is(rng, put, name):
    """Of saturated values and of those rounded to 0 too."""
    dtype = {"delayed": "bfloat16", "current": "float16"}.get(name, "float32")
    x = put(wide_range(rng, (8, 64), cases.DTYPES[dtype]), "dp", "tp")
    c = put(cases.random(rng, (8, 64), dtype), "dp", "tp")
    layout = LAYOUTS[len(dtype) % 3]
    quantizer = RECIPES[name].quantizer("input", layout)

    def f(x):
        return so.quantize(x, quantizer).dequantize()

    value, pull = jax.vjp(jax.jit(f), x)
    assert bits(pull(c)[0]) == bits(c)
    assert pull(c)[0].dtype == x.dtype
    assert bits(value) == bits(so.quantize(x, quantizer).dequantize())


@each_recipe
def test_cotangent_of_the_transposed_part_and_of_both_together(rng, name):
    x, c = jnp.asarray(cases.random(rng, (8, 64))), jnp.asarray(cases.random(rng, (64, 8)))
    quantizer = RECIPES[name].quantizer("input", "both")
    _, pull = jax.vjp(lambda x: so.quantize(x, quantizer).transposed.dequantize(), x)
    assert bits(pull(c)[0]) == bits(c.T)

    def both(x):
        scaled = so.quantize(x, quantizer)
        return scaled.dequantize(), scaled.transposed.dequantize()

    _, pull = jax.vjp(both, x)
    np.testing.assert_array_equal(np.asarray(pull((c.T, c))[0]), 2 * np.asarray(c.T))


@pytest.mark.parametrize("wrap", ["jit", "checkpoint", "scan", "vmap", "shard_map"])
def test_through_transformations(rng, wrap):
    """Quantised in one function, dequantised in another: the cotangent finds its way."""
    x = jnp.asarray(cases.random(rng, (4, 8, 64)))
    c = jnp.asarray(cases.random(rng, (4, 8, 64)))
    quantizer = RECIPES["block"].quantizer("input", "both")

    def quantize(x):
        return so.quantize(x, quantizer)

    def dequantize(scaled):
        return scaled.dequantize()

    def mapped(f):
        if wrap == "scan":
            return lambda xs: jax.lax.scan(lambda _, x: (None, f(x)), None, xs)[1]
        if wrap == "vmap":
            return jax.vmap(f)
        if wrap == "shard_map":
            mesh = meshes.make("auto", {"dp": 4})
            spec = jax.P("dp")
            return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
        return {"jit": jax.jit, "checkpoint": jax.checkpoint}[wrap](f)

    _, pull = jax.vjp(jax.jit(lambda x: mapped(dequantize)(mapped(quantize)(x))), x)
    assert bits(pull(c)[0]) == bits(c)


def test_second_derivatives(rng):
    """d/dx sum(q(x)^3) is 3 q(x)^2, and of that 6 q(x)."""
    x = jnp.asarray(cases.random(rng, (2, 32)))
    quantizer = RECIPES["current"].quantizer()

    def loss(x):
        return jnp.sum(so.quantize(x, quantizer).dequantize() ** 3)

    q = np.asarray(so.quantize(x, quantizer).dequantize())
    np.testing.assert_allclose(np.asarray(jax.grad(loss)(x)), 3 * q**2, rtol=1e-6)
    second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)
    np.testing.assert_allclose(np.asarray(second), 6 * q, rtol=1e-6)


def test_constants_have_no_gradient(rng):
    x = jnp.asarray(cases.random(rng, (2, 32)))
    quantizer = RECIPES["delayed"].quantizer()
    dx = jax.grad(lambda x: jnp.sum(so.quantize(x, quantizer).detach().dequantize()))(x)
    assert not np.asarray(dx).any()
    dq = jax.grad(lambda q: jnp.sum(so.quantize(x, q).dequantize()))(quantizer)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(dq))
    assert so.quantize(x, quantizer).detach().straight is None


def test_data_used_by_hand_have_no_gradient(rng):
    x = jnp.asarray(cases.random(rng, (2, 32)))

    def loss(x):
        scaled = so.quantize(x, RECIPES["current"].quantizer())
        return jnp.sum(scaled.data.astype(jnp.float32) * scaled.scale_inv) + scaled.amax

    assert not np.asarray(jax.grad(loss)(x)).any()


def test_no_copy_of_x_is_made_for_the_gradient():
    """`straight` is x itself; a program that does not return it writes 8 bits an element."""
    x = jnp.ones((256, 512), jnp.bfloat16)
    quantizer = RECIPES["delayed"].quantizer()
    assert so.quantize(x, quantizer).straight is x
    compiled = jax.jit(lambda x, q: so.quantize(x, q).detach()).lower(x, quantizer).compile()
    assert compiled.memory_analysis().output_size_in_bytes < 256 * 512 + 64


def test_policies_save_the_quantised(rng, capsys):
    """By name: 8-bit data are what is kept between the passes, up to the format's largest."""
    x = jnp.asarray(cases.random(rng, (64, 128)))
    quantizer = RECIPES["current"].quantizer()
    policy = jax.checkpoint_policies.save_only_these_names("shardops.quantized")

    def f(x):
        return jnp.sum(jnp.sin(so.quantize(jnp.tanh(x), quantizer).dequantize()))

    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(f, policy=policy), x)
    kept = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert "u8[64,128]" in kept
    assert kept.count("f32[64,128]") == 1  # x itself
    got = jax.grad(jax.checkpoint(f, policy=policy))(x)
    np.testing.assert_allclose(np.asarray(got), np.asarray(jax.grad(f)(x)), rtol=1e-6)
