"""layer_norm_dense and layer_norm_mlp against float64, sharded and not, quantised and not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import cases, meshes, references
from tests.closeness import assert_shards_close
from tests.layers.eight_bits import E4M3, E5M2, RECIPES
from tests.layers.test_dense_quantized import EXHAUSTIVE

SIZES = {"dp": 2, "tp": 2}
B, S, D, F = 2, 256, 128, 256
ACTIVATIONS = ("relu", "silu", "gelu", ("gelu", "linear"), ("silu", "linear"), ("relu", "silu"))


def factor(name, z):
    return references.activation_reference(z, None if name == "linear" else name)


def slope(name, z):
    if name == "linear":
        return np.ones_like(z)
    return references.activation_slope_reference(z, name)


def mlp_and_vjp(norm, activation, x, gamma, beta, kernels, biases, dy):
    """The value and the cotangents of a layer_norm_mlp, in float64 numpy."""
    wide = [np.asarray(a, np.float64) for a in (x, gamma, *kernels, *biases, dy)]
    x, gamma, up, down, up_bias, down_bias, dy = wide
    options = {"epsilon": 1e-6, "zero_centered_gamma": False}
    more = {"beta": beta} if norm == "layer_norm" else {}
    normed = getattr(references, f"{norm}_reference")(x, gamma, **more, **options).y
    pair = isinstance(activation, tuple)
    z = np.tensordot(normed, up, 1) + up_bias
    if pair:
        parts = [factor(a, z[..., i, :]) for i, a in enumerate(activation)]
        hidden = parts[0] * parts[1]
    else:
        hidden = factor(activation, z)
    y = hidden @ down + down_bias
    dhidden = dy @ down.T
    if pair:
        slopes = [slope(a, z[..., i, :]) for i, a in enumerate(activation)]
        dz = np.stack([dhidden * parts[1] * slopes[0], dhidden * parts[0] * slopes[1]], -2)
    else:
        dz = dhidden * slope(activation, z)
    rows = tuple(range(x.ndim - 1))
    dnormed = np.tensordot(dz, up, (list(range(x.ndim - 1, dz.ndim)), list(range(1, up.ndim))))
    vjp = getattr(references, f"{norm}_vjp_reference")(dnormed, x, gamma, **options)
    return y, {
        "x": vjp.x,
        "gamma": vjp.gamma,
        **({"beta": dnormed.sum(rows)} if norm == "layer_norm" else {}),
        "up": np.tensordot(normed, dz, (rows, rows)),
        "down": np.tensordot(hidden, dy, (rows, rows)),
        "up_bias": dz.sum(rows),
        "down_bias": dy.sum(rows),
    }


def drawn(rng, dtype, activation, norm):
    pair = (2,) * isinstance(activation, tuple)
    arrays = {
        "x": cases.random(rng, (B, S, D), dtype),
        "gamma": cases.random(rng, (D,), dtype),
        "up": cases.random(rng, (D, *pair, F), dtype, D**-0.5),
        "down": cases.random(rng, (F, D), dtype, F**-0.5),
        "up_bias": cases.random(rng, (*pair, F), dtype),
        "down_bias": cases.random(rng, (D,), dtype),
    }
    if norm == "layer_norm":
        arrays["beta"] = cases.random(rng, (D,), dtype)
    return arrays, cases.random(rng, (B, S, D), dtype)


def run(norm, activation, arrays, dy, qs=None, **options):
    """Value and cotangents from one program."""

    @jax.jit
    def program(arrays, dy):
        def layer(arrays):
            return so.layer_norm_mlp(
                arrays["x"],
                arrays["gamma"],
                (arrays["up"], arrays["down"]),
                beta=arrays.get("beta"),
                biases=(arrays["up_bias"], arrays["down_bias"]),
                norm=norm,
                activation=activation,
                quantizers=None if qs is None else so.recipes.watch(qs),
                **options,
            )

        y, pull = jax.vjp(layer, arrays)
        return y, pull(dy.astype(y.dtype))[0]

    return program(arrays, dy)


SPECS = {
    "x": ("dp", "tp"),
    "gamma": (),
    "beta": (),
    "up": (None, "tp"),
    "down": ("tp",),
    "up_bias": ("tp",),
    "down_bias": (),
}
SHARDED = {
    "hidden_sharding": P("dp", None, "tp"),
    "out_sharding": P("dp", "tp", None),
    "batch_dims": ((0,), ()),
}


def placed(mesh, arrays, pair):
    def spec(name):
        dims = SPECS[name]
        if pair and name.startswith("up"):
            dims = (*dims[:-1], None, "tp")
        return dims

    return {name: meshes.place(mesh, a, *spec(name)) for name, a in arrays.items()}


@pytest.mark.parametrize(
    ("norm", "activation", "dtype", "kind"),
    [
        (norm, activation, dtype, kind)
        for norm, activation, dtype, kind in itertools.product(
            ("rms_norm", "layer_norm"),
            ACTIVATIONS,
            ("float32", "bfloat16"),
            ("none", *meshes.KINDS),
        )
        if EXHAUSTIVE
        or (kind == "none" and (dtype == "float32" or activation == "gelu"))
        or (norm == "rms_norm" and activation == ("silu", "linear") and dtype == "float32")
    ],
)
def test_mlp_is_that_of_float64(rng, norm, activation, dtype, kind):
    arrays, dy = drawn(rng, dtype, activation, norm)
    want, cotangents = mlp_and_vjp(
        norm,
        activation,
        arrays["x"],
        arrays["gamma"],
        arrays.get("beta"),
        (arrays["up"], arrays["down"]),
        (arrays["up_bias"], arrays["down_bias"]),
        dy,
    )
    if kind == "none":
        y, got = run(norm, activation, arrays, dy)
    else:
        with meshes.entered(kind, SIZES) as mesh:
            inputs = placed(mesh, arrays, isinstance(activation, tuple))
            y, got = run(norm, activation, inputs, meshes.place(mesh, dy, "dp", "tp"), **SHARDED)
    # Roundings to the dtype on the way: norm, pre-activation, hidden, result; and back: hidden's
    # cotangent, the pre-activation's, the norm's, the result.
    assert_shards_close(y, want, reduced=D + F, roundings=4, what="y")
    assert got.keys() == cotangents.keys()
    for name, cotangent in got.items():
        assert cotangent.dtype == arrays[name].dtype
        assert_shards_close(
            cotangent, cotangents[name], reduced=B * S + D + F, roundings=8, what=name
        )


# How many numbers of E4M3 and of E5M2, each rounded once, make a result: operands of the products
# on the way to it, y and the cotangents, in the order of the layer.
ROUNDINGS = {
    "y": (4, 0),
    "down": (3, 1),
    "up": (5, 2),
    "x": (5, 2),
    "gamma": (5, 2),
    "up_bias": (3, 1),
}


@pytest.mark.parametrize(
    ("recipe", "activation", "kind"),
    [
        (recipe, activation, kind)
        for recipe, activation, kind in itertools.product(
            RECIPES, ("gelu", ("silu", "linear")), ("none", "explicit", "auto")
        )
        if EXHAUSTIVE
        or ((activation == "gelu") == (kind == "auto") and recipe in ("delayed", "block"))
        or (activation != "gelu" and kind == "none")
    ],
)
def test_quantised_mlp_is_that_of_float64_up_to_its_roundings(rng, recipe, activation, kind):
    arrays, dy = drawn(rng, "float32", activation, "rms_norm")
    want, cotangents = mlp_and_vjp(
        "rms_norm",
        activation,
        arrays["x"],
        arrays["gamma"],
        None,
        (arrays["up"], arrays["down"]),
        (arrays["up_bias"], arrays["down_bias"]),
        dy,
    )
    qs = tuple(RECIPES[recipe].dense_quantizers() for _ in range(2))
    if kind == "none":
        y, got = run("rms_norm", activation, arrays, dy, qs)
    else:
        with meshes.entered(kind, SIZES) as mesh:
            inputs = placed(mesh, arrays, isinstance(activation, tuple))
            y, got = run(
                "rms_norm", activation, inputs, meshes.place(mesh, dy, "dp", "tp"), qs, **SHARDED
            )
    for name, (of_e4m3, of_e5m2) in ROUNDINGS.items():
        one, other = (y, want) if name == "y" else (got[name], cotangents[name])
        off = np.linalg.norm(np.asarray(one) - other) / np.linalg.norm(other)
        bound = (of_e4m3 * E4M3**2 + of_e5m2 * E5M2**2) ** 0.5
        assert bound / 10 < off <= bound, f"{name}: {off:.3f}, bound {bound:.3f}"


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_layer_norm_dense_is_dense_of_the_norm(rng, recipe, norm):
    """With quantisers: of the norm in float32, which is not rounded before (bfloat16 x)."""
    x, gamma = cases.random(rng, (2, 64, 128), "bfloat16"), cases.random(rng, (128,), "float32")
    kernel = cases.random(rng, (128, 96), "float32", 0.1)
    qs = None if recipe is None else RECIPES[recipe].dense_quantizers()

    def fused(x, gamma, kernel, **more):
        return so.layer_norm_dense(x, gamma, kernel, norm=norm, quantizers=qs, **more)

    def apart(x, gamma, kernel):
        normed = getattr(so, norm)(x if qs is None else x.astype(jnp.float32), gamma)
        return so.dense(normed, kernel, quantizers=qs, out_dtype=jnp.float32)

    if recipe is None:
        both, normed = jax.jit(lambda *a: fused(*a, return_normed=True))(x, gamma, kernel)
        np.testing.assert_array_equal(normed, jax.jit(getattr(so, norm))(x, gamma))
        np.testing.assert_array_equal(both, jax.jit(fused)(x, gamma, kernel))
    got, want = (jax.jit(f)(x, gamma, kernel) for f in (fused, apart))
    assert got.dtype == jnp.float32
    assert_shards_close(got, want, reduced=128, what="y")


def test_return_normed_of_a_quantised_layer_is_the_norm(rng):
    """It is a value of its own then, rounded, and quantised after that."""
    x, gamma = (cases.random(rng, s, "bfloat16") for s in ((64, 128), (128,)))
    kernel = cases.random(rng, (128, 96), "bfloat16", 0.1)
    qs = so.recipes.CurrentScaling().dense_quantizers()
    out, normed = jax.jit(lambda *a: so.layer_norm_dense(*a, quantizers=qs, return_normed=True))(
        x, gamma, kernel
    )
    assert isinstance(normed, jax.Array)
    want = jax.jit(so.layer_norm)(x, gamma)
    np.testing.assert_array_equal(np.asarray(normed), np.asarray(want))
    np.testing.assert_array_equal(
        np.asarray(out),
        np.asarray(jax.jit(lambda y, w: so.dense(y, w, quantizers=qs))(want, kernel)),
    )
