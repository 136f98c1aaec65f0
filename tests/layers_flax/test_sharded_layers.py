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


def arrays(rng, of, dtype, batch=B):
    params = drawn(rng, of.shapes, dtype)
    x, cotangent = (cases.random(rng, (batch, S, D), dtype) for _ in range(2))
    return params, x, cotangent


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


@pytest.mark.parametrize(("framework", "dtype"), [("nnx", "bfloat16"), ("linen", "float32")])
@pytest.mark.parametrize("model", [LLAMA, BIASED], ids=["llama", "biased"])
def test_layer_without_a_mesh(rng, framework, model, dtype):
    of = layer(framework, model, use_bias=model is BIASED)
    params, x, cotangent = arrays(rng, of, dtype, batch=1)
    wanted = plain.in_float64(lambda p, x: plain.layer(p, x, model), cotangent, params, x)
    check(run(of, params, x, cotangent), wanted)


# Both frameworks compute by the same functions: each preset is run once, the one with the most
# collectives on both kinds of axes; all of them in an exhaustive run.
EVERY = [(p, k, f) for p in PRESETS for k in ("auto", "explicit") for f in FRAMEWORKS]
SOME = [
    ("dp", "auto", "linen"),
    ("fsdp", "explicit", "nnx"),
    ("tp", "auto", "nnx"),
    ("tp+sp", "auto", "linen"),
    ("tp+sp", "explicit", "nnx"),
    ("fsdp x tp", "explicit", "linen"),
]
ON_MESHES = EVERY if EXHAUSTIVE else SOME


@pytest.mark.parametrize(("preset", "kind", "framework"), ON_MESHES)
def test_layer_on_a_mesh(rng, preset, kind, framework):
    model = BIASED if preset in ("tp", "dp") else LLAMA
    rules = PRESETS[preset]()
    of = layer(framework, model, use_bias=model is BIASED, rules=rules)
    dtype = "bfloat16" if (preset, framework) == ("tp+sp", "linen") else "float32"
    params, x, cotangent = arrays(rng, of, dtype, batch=8 if "tp" not in preset else B)
    wanted = plain.in_float64(lambda p, x: plain.layer(p, x, model), cotangent, params, x)
    with meshes.entered(kind, MESHES[preset]) as mesh:
        at = stream(mesh, rules)
        held = placed(mesh, rules, of.names, params)
        out = None
        if kind == "auto":
            out = (at, (jax.tree.map(lambda a: a.sharding, held), at))
        got = run(of, held, jax.device_put(x, at), jax.device_put(cotangent, at), out)
        check(got, wanted)
        assert meshes.same(got[0].sharding.spec, at.spec)


@pytest.mark.parametrize(
    ("framework", "inner"), [("nnx", "auto"), ("linen", "explicit"), ("nnx", "manual")]
)
def test_layer_inside_shard_map(rng, framework, inner):
    """Manual over dp, whose batch is each device's own; tensor parallel inside, or alone."""
    rules = PRESETS["tp+sp"]() if inner != "manual" else PRESETS["dp"]()
    sizes = {"dp": 2, "tp": 4} if inner != "manual" else {"dp": 8}
    model = Model(causal=True)
    of = layer(framework, model, rules=rules)
    params, x, cotangent = arrays(rng, of, "float32", batch=8)
    wanted = plain.in_float64(lambda p, x: plain.layer(p, x, model), cotangent, params, x)
    with meshes.entered("explicit" if inner == "explicit" else "auto", sizes) as mesh:
        at = stream(mesh, rules)
        held = placed(mesh, rules, of.names, params)

        @jax.jit
        @jax.shard_map(
            in_specs=(P(), P("dp"), P("dp")), out_specs=(P("dp"), (P(), P("dp"))), axis_names={"dp"}
        )
        def step(params, x, cotangent):
            value, pull = jax.vjp(of.apply, params, x)
            return value, pull(cotangent)

        got = step(held, jax.device_put(x, at), jax.device_put(cotangent, at))
        check(got, wanted)
