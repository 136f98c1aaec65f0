"""What a transformer layer moves between devices: exact counts and bytes, each pass by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops import hlo
from shardops.layers import presets
from tests import meshes
from tests.fuzz.amount import EXHAUSTIVE
from tests.layers_flax.plain import Model
from tests.layers_flax.programs import (
    FRAMEWORKS,
    HEADS,
    KV,
    MESHES,
    PRESETS,
    B,
    D,
    F,
    S,
    drawn,
    layer,
    placed,
    stream,
)
from tests.moved import size

MODEL = Model(activation=("silu", "linear"), rope_theta=1e4)
HEAD = D // HEADS
QKV = (D, KV, HEADS // KV + 2, HEAD)  # queries, keys and values side by side
WEIGHTS = size(*QKV) + size(HEADS, HEAD, D) + size(D, 2, F) + size(F, D)


# Both kinds of axes for each, and both frameworks, in an exhaustive run.
KINDS = ("auto", "explicit")
BOTH = (
    [(f, k) for f in FRAMEWORKS for k in KINDS]
    if EXHAUSTIVE
    else [*zip(FRAMEWORKS, KINDS, strict=True)]
)
AUTO = KINDS if EXHAUSTIVE else KINDS[:1]
EXPLICIT = KINDS if EXHAUSTIVE else KINDS[1:]


def passes(framework, kind, preset, batch=B, **options):
    """The collectives of both passes, each compiled by itself."""
    rules = PRESETS[preset]() if isinstance(preset, str) else preset
    sizes = MESHES[preset] if isinstance(preset, str) else MESHES["tp+sp"]
    of = layer(framework, MODEL, rules=rules, **options)
    with meshes.entered(kind, sizes) as mesh:
        batch_first = options.get("batch_first", True)
        at = stream(mesh, rules, batch_first)
        params = placed(mesh, rules, of.names, drawn(np.random.default_rng(0), of.shapes))
        x = jax.device_put(jnp.ones((batch, S, D) if batch_first else (S, batch, D)), at)
        auto = kind == "auto"
        given = {"out_shardings": (at, None)} if auto else {}
        forward = jax.jit(lambda params, x: jax.vjp(of.apply, params, x), **given)
        y, pull = forward(params, x)
        ends = (jax.tree.map(lambda a: a.sharding, params), at)
        backward = jax.jit(lambda pull, dy: pull(dy), **({"out_shardings": ends} if auto else {}))
        programs = (forward.lower(params, x), backward.lower(pull, y))
        return [hlo.collectives(program.compile()) for program in programs]


def kinds(found):
    return {kind: count for kind, (count, _) in hlo.summary(found).items()}


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch", "sequence"])
@pytest.mark.parametrize(("framework", "kind"), BOTH)
def test_tensor_and_sequence_parallel(framework, kind, batch_first):
    """Forward 2 gathers and 2 scatters, no all-reduce. Backward 2 and 2, and one more gather for
    each of the two column-parallel weight gradients; then the sums over dp, and over all rows for
    the norms' parameters. Attention moves nothing."""
    forward, backward = passes(framework, kind, "tp+sp", batch_first=batch_first)
    whole, part = size(B // 2, S, D), size(B // 2, S // 4, D)
    assert hlo.summary(forward) == {"all-gather": (2, 2 * whole), "reduce-scatter": (2, 2 * part)}
    over_tp = hlo.summary([c for c in backward if c.groups == 4])
    assert over_tp == {"all-gather": (4, 4 * whole), "reduce-scatter": (2, 2 * part)}
    sums = [c for c in backward if c.groups != 4]
    assert hlo.summary(sums) == {"all-reduce": (2, WEIGHTS // 4 + 2 * size(D))}
    assert sorted(c.groups for c in sums) == [2, 8]
    asked = {hlo.asked_by(c) for c in (*forward, *backward)}
    assert asked == {"shardops.gemm", "shardops.gemm.grad", "shardops.rms_norm.grad"}


@pytest.mark.parametrize("kind", AUTO)
def test_tensor_parallel(kind):
    forward, backward = passes("linen", kind, "tp")
    whole = size(B // 2, S, D)
    assert hlo.summary(forward) == {"all-reduce": (2, 2 * whole)}
    assert hlo.summary([c for c in backward if c.groups == 4]) == {"all-reduce": (2, 2 * whole)}
    rest = hlo.summary([c for c in backward if c.groups == 2])
    assert rest == {"all-reduce": (1, WEIGHTS // 4 + 2 * size(D))}


@pytest.mark.parametrize("kind", EXPLICIT)
def test_data_parallel(kind):
    forward, backward = passes("nnx", kind, "dp", batch=8)
    assert forward == ()
    assert hlo.summary(backward) == {"all-reduce": (1, WEIGHTS + 2 * size(D))}


@pytest.mark.parametrize("kind", AUTO)
def test_fsdp(kind):
    """A gather a use of a weight, a scatter a weight gradient; of many tokens, so weights move."""
    forward, backward = passes("nnx", kind, "fsdp", batch=32)
    assert hlo.summary(forward) == {"all-gather": (4, WEIGHTS)}
    assert hlo.summary(backward) == {
        "all-gather": (4, WEIGHTS),
        "reduce-scatter": (4, WEIGHTS // 8),
        "all-reduce": (1, 2 * size(D)),
    }


@pytest.mark.parametrize("kind", EXPLICIT)
def test_fsdp_and_tensor_parallel(kind):
    """Over tp as without FSDP; over fsdp as without tp, but for the product out of heads, whose
    kernel is as large as the tokens of a device: there either may move."""
    forward, backward = passes("linen", kind, "fsdp x tp")
    along = {4: {"all-gather": 2, "reduce-scatter": 2}, 2: {"all-gather": 4}}
    for groups, wanted in along.items():
        assert kinds([c for c in forward if c.groups == groups]) == wanted
    along = {
        8: {"all-reduce": 1},
        4: {"all-gather": 4, "reduce-scatter": 2},
        2: {"all-gather": 4, "reduce-scatter": 4},
    }
    for groups, wanted in along.items():
        assert kinds([c for c in backward if c.groups == groups]) == wanted


@pytest.mark.parametrize(
    ("policy", "batch_first"), [("recomputed", True), ("saved", True), ("saved", False)]
)
def test_gathered_inputs_are_kept_by_policy(policy, batch_first):
    """Layers in a scan, each checkpointed: the backward body computes the forward pass again, and
    gathers for it; what is kept is not gathered again."""
    rules = PRESETS["tp+sp"]()
    of = layer("linen", MODEL, rules=rules, keep_gathered=True, batch_first=batch_first)
    options = {"policy": so.checkpoint_policies.save_gathered} if policy == "saved" else {}
    with meshes.entered("explicit", MESHES["tp+sp"]) as mesh:
        at = stream(mesh, rules, batch_first)
        params = drawn(np.random.default_rng(0), of.shapes)
        stacked = jax.tree.map(lambda a: np.stack([a] * 3), params)
        names = jax.tree.map(
            lambda axes: (None, *axes), of.names, is_leaf=lambda n: isinstance(n, tuple)
        )
        stacked = placed(mesh, rules, names, stacked)
        x = jax.device_put(jnp.ones((B, S, D) if batch_first else (S, B, D)), at)
        one = jax.checkpoint(of.apply, **options)

        def loss(params, x):
            y, _ = jax.lax.scan(lambda x, p: (one(p, x), None), x, params)
            return jnp.sum(y * y)

        compiled = jax.jit(jax.grad(loss)).lower(stacked, x).compile()
    over_tp = kinds([c for c in hlo.collectives(compiled) if c.groups == 4])
    # Forward body 2 and 2; backward body 2 and 2, and what the forward pass takes again.
    again = 0 if policy == "saved" else 2
    assert over_tp["all-gather"] == 4 + again


@pytest.mark.parametrize("kind", AUTO)
def test_fewer_key_heads_than_devices(kind):
    """Their kernels are copies on each device, and each device computes the heads that it needs:
    forward as with enough heads; backward the gradients of the copies are put together."""
    rules = presets.tensor_sequence_parallel("tp", data="dp", replicate_kv=True)
    forward, backward = passes("nnx", kind, rules, num_kv_heads=2)
    assert kinds(forward) == {"all-gather": 2, "reduce-scatter": 2}
    asked = [c for c in backward if c.groups == 4 and hlo.asked_by(c).startswith("shardops.")]
    assert kinds(asked) == {"all-gather": 4, "reduce-scatter": 2}
    rest = [c for c in backward if not hlo.asked_by(c).startswith("shardops.")]
    assert sum(hlo.received_bytes(c) for c in rest) <= 2 * 4 * size(D, 2, HEAD)
