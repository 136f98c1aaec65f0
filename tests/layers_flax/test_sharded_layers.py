"""A transformer layer sharded any way is the unsharded one: values and gradients in float64's."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from tests import cases, meshes
from tests.closeness import assert_shards_close
from tests.fuzz.amount import EXHAUSTIVE
from tests.layers_flax import plain
from tests.layers_flax.plain import Model
from tests.layers_flax.programs import (
    FRAMEWORKS,
    MESHES,
    PRESETS,
    B,
    D,
    S,
    drawn,
    layer,
    placed,
    stream,
)

LLAMA = Model(activation=("silu", "linear"), rope_theta=1e4)
# Without rotary positions the cotangent of the keys' bias is 0: every query sees the same shift.
BIASED = Model(norm="layer_norm", causal=False, rope_theta=1e3)


# Activations are [batch, length, features], or [length, batch, features].
ORDERS = {"batch": True, "sequence": False}
FIRST = pytest.mark.parametrize("first", ORDERS)


def arrays(rng, of, dtype, batch=B, first="batch"):
    params = drawn(rng, of.shapes, dtype)
    shape = (batch, S, D) if ORDERS[first] else (S, batch, D)
    x, cotangent = (cases.random(rng, shape, dtype) for _ in range(2))
    return params, x, cotangent


def in_float64(model, first, params, x, cotangent):
    """The formulas, which are of activations whose batch is first."""

    def layer(params, x):
        if ORDERS[first]:
            return plain.layer(params, x, model)
        return plain.layer(params, x.swapaxes(0, 1), model).swapaxes(0, 1)

    return plain.in_float64(layer, cotangent, params, x)


def check(got, wanted, what=""):
    """Rounded some ten times on the way to a value, twice that to a gradient. Errors of the first
    steps pass through softmax and norms, which shrink no error of a row of unit size."""
    (value, gradients), (want, cotangents) = got, wanted
    assert_shards_close(value, want, reduced=16 * D, roundings=8, what=f"{what} value")
    for (path, g), w in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(cotangents), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert_shards_close(g, w, reduced=64 * D, roundings=16, what=f"{what} gradient of {name}")


def run(of, params, x, cotangent, out=None, **tokens):
    def step(params, x, cotangent, tokens):
        value, pull = jax.vjp(lambda params, x: of.apply(params, x, **tokens), params, x)
        return value, pull(cotangent)

    options = {} if out is None else {"out_shardings": out}
    return jax.jit(step, **options)(params, x, cotangent, tokens)


@FIRST
@pytest.mark.parametrize(("framework", "dtype"), [("nnx", "bfloat16"), ("linen", "float32")])
@pytest.mark.parametrize("model", [LLAMA, BIASED], ids=["llama", "biased"])
def test_layer_without_a_mesh(rng, framework, model, dtype, first):
    of = layer(framework, model, use_bias=model is BIASED, batch_first=ORDERS[first])
    params, x, cotangent = arrays(rng, of, dtype, batch=1, first=first)
    wanted = in_float64(model, first, params, x, cotangent)
    check(run(of, params, x, cotangent), wanted)


# Both frameworks compute by the same functions: each preset is run once, the one with the most
# collectives on both kinds of axes; all of them in an exhaustive run.
EVERY = [
    (p, k, f, o) for p in PRESETS for k in ("auto", "explicit") for f in FRAMEWORKS for o in ORDERS
]
SOME = [
    ("dp", "auto", "linen", "batch"),
    ("dp", "explicit", "nnx", "sequence"),
    ("fsdp", "explicit", "nnx", "batch"),
    ("fsdp", "auto", "linen", "sequence"),
    ("tp", "auto", "nnx", "batch"),
    ("tp", "explicit", "linen", "sequence"),
    ("tp+sp", "auto", "linen", "batch"),
    ("tp+sp", "auto", "nnx", "sequence"),
    ("tp+sp", "explicit", "nnx", "batch"),
    ("tp+sp", "explicit", "linen", "sequence"),
    ("fsdp x tp", "explicit", "linen", "batch"),
    ("fsdp x tp", "explicit", "nnx", "sequence"),
]
ON_MESHES = EVERY if EXHAUSTIVE else SOME


@pytest.mark.parametrize(("preset", "kind", "framework", "first"), ON_MESHES)
def test_layer_on_a_mesh(rng, preset, kind, framework, first):
    model = BIASED if preset in ("tp", "dp") else LLAMA
    rules = PRESETS[preset]()
    of = layer(framework, model, use_bias=model is BIASED, rules=rules, batch_first=ORDERS[first])
    dtype = "bfloat16" if (preset, framework) == ("tp+sp", "linen") else "float32"
    batch = 8 if "tp" not in preset else B
    params, x, cotangent = arrays(rng, of, dtype, batch, first)
    wanted = in_float64(model, first, params, x, cotangent)
    with meshes.entered(kind, MESHES[preset]) as mesh:
        at = stream(mesh, rules, ORDERS[first])
        held = placed(mesh, rules, of.names, params)
        out = None
        if kind == "auto":
            out = (at, (jax.tree.map(lambda a: a.sharding, held), at))
        got = run(of, held, jax.device_put(x, at), jax.device_put(cotangent, at), out)
        check(got, wanted)
        assert meshes.same(got[0].sharding.spec, at.spec)


@pytest.mark.parametrize(
    ("framework", "inner", "first"),
    [
        ("nnx", "auto", "batch"),
        ("linen", "explicit", "batch"),
        ("nnx", "manual", "batch"),
        ("nnx", "explicit", "sequence"),
    ],
)
def test_layer_inside_shard_map(rng, framework, inner, first):
    """Manual over dp, whose batch is each device's own; tensor parallel inside, or alone."""
    rules = PRESETS["tp+sp"]() if inner != "manual" else PRESETS["dp"]()
    sizes = {"dp": 2, "tp": 4} if inner != "manual" else {"dp": 8}
    model = Model(causal=True)
    of = layer(framework, model, rules=rules, batch_first=ORDERS[first])
    params, x, cotangent = arrays(rng, of, "float32", 8, first)
    wanted = in_float64(model, first, params, x, cotangent)
    with meshes.entered("explicit" if inner == "explicit" else "auto", sizes) as mesh:
        at = stream(mesh, rules, ORDERS[first])
        held = placed(mesh, rules, of.names, params)
        own = P("dp") if ORDERS[first] else P(None, "dp")

        @jax.jit
        @jax.shard_map(in_specs=(P(), own, own), out_specs=(own, (P(), own)), axis_names={"dp"})
        def step(params, x, cotangent):
            value, pull = jax.vjp(of.apply, params, x)
            return value, pull(cotangent)

        got = step(held, jax.device_put(x, at), jax.device_put(cotangent, at))
        check(got, wanted)
