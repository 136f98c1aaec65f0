"""Transformer layers on real collectives: values, gradients, what moves, in 16 and in 8 bits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from shardops.layers import linen
from shardops.layers import nnx as of_nnx
from tests import cases, meshes
from tests.layers_flax import plain, programs
from tests.layers_flax import test_sharded_layers as sharded
from tests.layers_flax.plain import Model
from tests.layers_flax.programs import HEADS, KV, PRESETS, D, F
from tests.multi_gpu import grid

LLAMA = Model(activation=("silu", "linear"), rope_theta=1e4)
RECIPES = {
    "delayed": so.recipes.DelayedScaling(amax_history_len=4),
    "current": so.recipes.CurrentScaling(),
    "block": so.recipes.Block128Scaling(),
}
BATCH = 8


def axes_of(preset):
    """The mesh of a preset."""
    count = len(jax.devices())
    if preset == "fsdp x tp":
        return {"fsdp": 2, "tp": count // 2}
    return {preset: count} if preset in ("dp", "fsdp") else grid.sizes()


def in_float64(model, params, x, cotangent):
    """On the CPU, where its many small programs compile in no time."""
    with jax.default_device(jax.devices("cpu")[0]):
        return plain.in_float64(lambda p, x: plain.layer(p, x, model), cotangent, params, x)


ROUTES = [
    ("tp+sp", "auto", "linen"),
    ("tp+sp", "auto", "nnx"),
    ("tp+sp", "explicit", "linen"),
    ("tp+sp", "explicit", "nnx"),
    ("fsdp", "auto", "nnx"),
    ("fsdp", "explicit", "linen"),
    ("tp", "explicit", "nnx"),
    ("dp", "auto", "linen"),
    ("fsdp x tp", "explicit", "nnx"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("preset", "kind", "framework"), ROUTES)
def test_layer_against_float64(rng, preset, kind, framework, dtype):
    model = sharded.BIASED if preset in ("tp", "dp") else LLAMA
    rules = PRESETS[preset]()
    of = programs.layer(framework, model, use_bias=model is sharded.BIASED, rules=rules)
    params, x, cotangent = sharded.arrays(rng, of, dtype, batch=BATCH)
    wanted = in_float64(model, params, x, cotangent)
    with grid.entered(kind, axes_of(preset)) as mesh, jax.default_matmul_precision("float32"):
        at = programs.stream(mesh, rules)
        held = programs.placed(mesh, rules, of.names, params)
        out = (at, (jax.tree.map(lambda a: a.sharding, held), at)) if kind == "auto" else None
        x, cotangent = (jax.device_put(a, at) for a in (x, cotangent))
        sharded.check(sharded.run(of, held, x, cotangent, out), wanted)


# ---- in 8 bits -----------------------------------------------------------------------------------

SEQUENCE = 512  # which four devices cut into blocks of 128


def in_8_bits(framework, recipe, rules):
    """A function of parameters, state and x, its first state, and what it is without a recipe."""
    options = {"num_kv_heads": KV, "activation": LLAMA.activation, "rope_theta": LLAMA.rope_theta}
    options |= {"norm": LLAMA.norm, "recipe": RECIPES[recipe]}
    without = programs.layer(framework, LLAMA, rules=rules)
    if framework == "linen":
        module = linen.TransformerLayer(HEADS, F, **options)
        first = nn.unbox(module.init(jax.random.key(0), jnp.ones((1, 8, D))))
        state = {name: held for name, held in first.items() if name != "params"}
        module = module.clone(rules=rules)
        apply = lambda p, s, x: module.apply(linen.watch({"params": p, **s}), x)  # noqa: E731
        return apply, state, without
    module = of_nnx.TransformerLayer(D, HEADS, F, rules=rules, rngs=nnx.Rngs(0), **options)
    graph, shapes, state = nnx.split(module, nnx.Param, of_nnx.QuantizerState)

    def apply(params, state, x):
        held = jax.tree.map(lambda a: a, shapes)
        nnx.replace_by_pure_dict(held, params)
        return of_nnx.watch(nnx.merge(graph, held, state))(x)

    return apply, state, without


def value_and_gradients(apply, out=None):
    def step(params, state, x, cotangent):
        y, pull = jax.vjp(apply, params, state, x)
        dparams, seen, dx = pull(cotangent)
        return y, dparams, dx, seen

    return jax.jit(step) if out is None else jax.jit(step, out_shardings=out)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("preset", "kind", "framework"),
    [
        ("tp+sp", "explicit", "nnx"),
        ("tp+sp", "auto", "linen"),
        ("fsdp", "explicit", "linen"),
        ("fsdp", "auto", "nnx"),
    ],
)
def test_layer_in_8_bits_is_as_good_as_on_one_device(rng, preset, kind, framework, recipe):
    """Another last bit of a norm puts numbers on the next of a format: the two differ, but not in
    how far they are from the layer in float64: on a CPU up to 0.13, of attention's gradients. The
    kernels' largest magnitudes are exact."""
    rules = PRESETS[preset]()
    apply, state, of = in_8_bits(framework, recipe, rules)
    params = programs.drawn(rng, of.shapes, "bfloat16")
    x, cotangent = (cases.random(rng, (BATCH, SEQUENCE, D), "bfloat16") for _ in range(2))
    exact = in_float64(LLAMA, params, x, cotangent)
    alone, first, _ = in_8_bits(framework, recipe, ())
    one = value_and_gradients(alone)(params, first, x, cotangent)
    with grid.entered(kind, axes_of(preset)) as mesh:
        at = programs.stream(mesh, rules)
        held = programs.placed(mesh, rules, of.names, params)
        out = None
        if kind == "auto":
            out = (at, jax.tree.map(lambda a: a.sharding, held), at, None)
        x, cotangent = (jax.device_put(a, at) for a in (x, cotangent))
        got = value_and_gradients(apply, out)(held, state, x, cotangent)
    wanted = (exact[0], *exact[1])
    for (path, ours), other, true in zip(
        jax.tree.leaves_with_path(got[:3]),
        jax.tree.leaves(one[:3]),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        errors = [np.asarray(a, np.float64) - true for a in (ours, other)]
        mesh_error, one_error = (np.linalg.norm(e) / np.linalg.norm(true) for e in errors)
        what = f"{jax.tree_util.keystr(path)}: {mesh_error:.3g}, on one device {one_error:.3g}"
        assert one_error <= 0.2, what
        assert mesh_error <= 1.1 * one_error + 2**-8, what
    seen = [a for a in jax.tree.leaves(got[3]) if a.shape == (4,)]  # histories
    assert len(seen) == (12 if recipe == "delayed" else 0)  # of four products three each
    for history, other in zip(
        seen, [a for a in jax.tree.leaves(one[3]) if a.shape == (4,)], strict=True
    ):
        for shard in history.addressable_shards:
            np.testing.assert_array_equal(shard.data, history)
            np.testing.assert_allclose(shard.data, other, rtol=0.25)
    largest = {float(np.abs(a).max()) for a in jax.tree.leaves(params) if a.ndim > 1}
    kernels = {float(h[0]) for h in seen} & largest
    assert len(kernels) >= 3 * (recipe == "delayed")  # those of query, key and value are one


# ---- what moves ----------------------------------------------------------------------------------

WEIGHTS = D * KV * (HEADS // KV + 2) * (D // HEADS) + D * D + 3 * D * F
NORMS = 4 * 2 * D  # their gradients are summed in float32


def passes(kind, preset, dtype, batch):
    """{kind: (arrays, bytes)} of both passes, each compiled by itself."""
    rules = PRESETS[preset]()
    of = programs.layer("linen", LLAMA, rules=rules)
    with grid.entered(kind, axes_of(preset)) as mesh:
        at = programs.stream(mesh, rules)
        params = programs.drawn(np.random.default_rng(0), of.shapes, dtype)
        params = programs.placed(mesh, rules, of.names, params)
        x = jax.device_put(jnp.ones((batch, programs.S, D), dtype), at)
        ends = (jax.tree.map(lambda a: a.sharding, params), at)
        auto = kind == "auto"
        forward = jax.jit(
            lambda params, x: jax.vjp(of.apply, params, x),
            **({"out_shardings": (at, None)} if auto else {}),
        )
        y, pull = forward(params, x)
        backward = jax.jit(lambda pull, dy: pull(dy), **({"out_shardings": ends} if auto else {}))
        programs_of = (forward.lower(params, x), backward.lower(pull, y))
        return [moved(hlo.collectives(p.compile())) for p in programs_of]


def moved(found):
    """However XLA combined them."""
    out = {}
    for c in found:
        arrays, size = out.get(c.kind, (0, 0))
        out[c.kind] = (arrays + c.arrays, size + c.bytes)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", grid.KINDS)
def test_what_a_tensor_and_sequence_parallel_layer_moves(kind, dtype):
    """Forward 2 gathers and 2 scatters; backward 2 and 2, and a gather for each of the two
    column-parallel weight gradients. Besides these sums over dp, and of the norms' gradients."""
    dp, tp = grid.sizes().values()
    # As many tokens in a group as features: so few that they move, and no kernel.
    forward, backward = passes(kind, "tp+sp", dtype, batch=dp * D // programs.S)
    whole = D * D * jnp.dtype(dtype).itemsize
    assert forward == {"all-gather": (2, 2 * whole), "reduce-scatter": (2, 2 * whole // tp)}
    _, sums = backward.pop("all-reduce")
    over_dp = WEIGHTS // tp * jnp.dtype(dtype).itemsize if dp > 1 else 0
    assert sums == NORMS + over_dp
    assert backward == {"all-gather": (4, 4 * whole), "reduce-scatter": (2, 2 * whole // tp)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", grid.KINDS)
def test_what_an_fsdp_layer_moves(kind, dtype):
    """A gather a use of a weight, a scatter a weight gradient; many tokens, so weights move."""
    count, item = len(jax.devices()), jnp.dtype(dtype).itemsize
    forward, backward = passes(kind, "fsdp", dtype, batch=16 * count)
    assert forward == {"all-gather": (4, WEIGHTS * item)}
    _, sums = backward.pop("all-reduce")
    assert sums == NORMS
    assert backward == {
        "all-gather": (4, WEIGHTS * item),
        "reduce-scatter": (4, WEIGHTS * item // count),
    }


def test_an_mlp_in_8_bits_gathers_8_bits():
    """Explicit axes, `CurrentScaling`: each gather of the stream is of a byte an element."""
    dp, tp = grid.sizes().values()
    recipe = RECIPES["current"]
    quantizers = (recipe.dense_quantizers(), recipe.dense_quantizers())
    with grid.entered("explicit") as mesh:
        x = meshes.place(mesh, jnp.ones((BATCH, 128, D), jnp.bfloat16), "dp", "tp")
        up = meshes.place(mesh, jnp.ones((D, F), jnp.bfloat16), None, "tp")
        down = meshes.place(mesh, jnp.ones((F, D), jnp.bfloat16), "tp")

        def loss(x, up, down):
            y = so.layer_norm_mlp(
                x,
                jnp.ones(D, jnp.bfloat16),
                (up, down),
                norm="rms_norm",
                quantizers=quantizers,
                hidden_sharding=P("dp", None, "tp"),
                out_sharding=P("dp", "tp", None),
                batch_dims=((0,), ()),
            )
            return jnp.sum(y.astype(jnp.float32) ** 2)

        step = jax.jit(jax.grad(loss, (0, 1, 2)))
        found = [c for c in hlo.collectives(step.lower(x, up, down).compile()) if c.bytes > 1024]
    whole = BATCH // dp * 128 * D
    gathers = [c for c in found if c.kind == "all-gather"]
    # x in both passes, and the cotangent once for both of its products.
    assert moved(gathers) == {"all-gather": (3, 3 * whole)}
    assert moved(found)["reduce-scatter"] == (2, 2 * 2 * whole // tp)
