"""Modules of sequence-first activations give what they give of the same ones, the batch first.

Against float64, and on every preset: test_sharded_layers.py.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import shardops as so
from shardops.layers import linen, presets
from shardops.layers import nnx as of_nnx
from tests import cases, meshes
from tests.closeness import assert_close

B, S, D = 3, 6, 16
RULES = presets.tensor_sequence_parallel("tp", data="dp")
LENGTHS = np.array([5, 0, 3], np.int32)
POSITIONS = np.arange(S) + np.array([[2], [0], [9]])


def attention(framework, batch_first, x, kv, **options):
    """(parameters, a function of them, x and kv) of a module."""
    options = {"num_kv_heads": 2, "head_dim": 8, "batch_first": batch_first, **options}
    if framework == "nnx":
        of_kv = None if kv is None else kv.shape[-1]
        rngs = nnx.Rngs(0)
        module = of_nnx.MultiHeadAttention(4, D, in_kv_features=of_kv, rngs=rngs, **options)
        graph, params = nnx.split(module)
        return params, lambda params, *xs, **call: nnx.merge(graph, params)(*xs, **call)
    module = linen.MultiHeadAttention(4, **options)
    made = linen.MultiHeadAttention(4, **{**options, "mask_kind": "none"})
    return nn.unbox(made.init(jax.random.key(0), x, kv)), module.apply


def value_and_gradients(framework, cotangent, x, kv, batch_first, made, called):
    """As with the batch first."""

    def order(a):
        return a if batch_first or a is None else a.swapaxes(0, 1)

    params, apply = attention(framework, batch_first, order(x), order(kv), **made)

    def run(params, *xs):
        return order(apply(params, *map(order, xs), **called))

    value, pull = jax.vjp(run, params, *(a for a in (x, kv) if a is not None))
    return jax.tree.leaves((value, pull(cotangent)))


MASK = np.random.default_rng(3).random((B, 1, S, S)) < 0.7
CALLS = {
    "positions of each": ({"rope_theta": 100.0}, {"positions": POSITIONS}),
    "padded and causal": (
        {"mask_kind": "padding_causal", "rope_theta": 100.0},
        {"lengths": LENGTHS, "positions": np.arange(S) + 4},
    ),
    # Without rotary positions a bias of the keys has no gradient but rounding.
    "a mask": ({"mask_kind": "causal", "use_bias": False}, {"mask": MASK}),
    "other keys": ({"mask_kind": "padding", "use_bias": False}, {"lengths": LENGTHS}),
}


@pytest.mark.parametrize(
    ("name", "framework"), [*zip(CALLS, ("nnx", "linen", "nnx", "linen"), strict=True)]
)
def test_attention_of_either_order(rng, name, framework):
    """Parameters are the same, and so are masks, lengths and positions, whatever the order."""
    x, cotangent = (cases.random(rng, (B, S, D), "float32") for _ in range(2))
    kv = cases.random(rng, (B, 9, 12), "float32") if name == "other keys" else None
    want, got = (
        value_and_gradients(framework, cotangent, x, kv, first, *CALLS[name])
        for first in (True, False)
    )
    for one, other in zip(got, want, strict=True):
        assert_close(one, np.asarray(other, np.float64), reduced=B * S + D, roundings=4)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (so.recipes.Block128Scaling(), "explicit"),
        (so.recipes.MXFP8Scaling(), "auto"),
        (so.recipes.DelayedScaling(amax_history_len=4), "explicit"),
    ],
    ids=["block128", "mxfp8", "delayed"],
)
def test_recipes_of_either_order_on_a_mesh(rng, recipe, kind):
    """Blocks lie along the sequence, wherever it is, so the same numbers are rounded alike. A sum
    in another order may round one the other way: by 2^-4 of it, one of hundreds in a sum."""
    batch, length, features = 4, 64, 128
    x, cotangent = (cases.random(rng, (batch, length, features), "float32") for _ in range(2))

    def run(batch_first):
        options = {"rules": RULES, "recipe": recipe, "batch_first": batch_first}
        module = of_nnx.TransformerLayer(
            features, 8, 256, num_kv_heads=4, rope_theta=1e4, rngs=nnx.Rngs(0), **options
        )
        graph, params, state = nnx.split(module, nnx.Param, ...)
        at = presets.layout(RULES, batch_first=batch_first).stream
        order = (lambda a: a) if batch_first else (lambda a: a.swapaxes(0, 1))

        @jax.jit
        def step(params, state, x, cotangent):
            def apply(params, state, x):
                return of_nnx.watch(nnx.merge(graph, params, state), overwrite=False)(x)

            value, pull = jax.vjp(apply, params, state, x)
            return value, pull(cotangent)

        given = (jax.device_put(order(a), NamedSharding(mesh, at)) for a in (x, cotangent))
        value, (of_params, seen, of_x) = step(params, state, *given)
        assert meshes.same(value.sharding.spec, at)
        return jax.tree.leaves((order(value), order(of_x), of_params, seen))

    with meshes.entered(kind) as mesh:
        want, got = (run(first) for first in (True, False))
    for one, other in zip(got, want, strict=True):
        one, other = (np.asarray(a, np.float64) for a in (one, other))
        assert np.abs(one - other).max() <= 2**-9 * np.abs(other).max()


def test_an_mlp_of_either_order(rng):
    """Its activations lie by their names; a flag is a flag."""
    x = cases.random(rng, (16, 4, D), "float32")
    want = of_nnx.LayerNormMLP(D, 32, rngs=nnx.Rngs(0))(x.swapaxes(0, 1)).swapaxes(0, 1)
    with meshes.entered("explicit") as mesh:
        at = meshes.place(mesh, x, "tp", "dp")
        options = {"batch_first": False, "rules": RULES}
        got = of_nnx.LayerNormMLP(D, 32, rngs=nnx.Rngs(0), **options)(at)
        assert meshes.same(got.sharding.spec, at.sharding.spec)
        variables = linen.LayerNormMLP(32, **options).init(jax.random.key(0), at)
        other = linen.LayerNormMLP(32, **options).apply(nn.unbox(variables), at)
        assert meshes.same(other.sharding.spec, at.sharding.spec)
    assert_close(got, np.asarray(want, np.float64), reduced=D, roundings=4)
    for make in (
        lambda: of_nnx.TransformerLayer(D, 2, 32, batch_first=0, rngs=nnx.Rngs(0)),
        lambda: linen.LayerNormMLP(32, batch_first=0).init(jax.random.key(0), x),
    ):
        with pytest.raises(TypeError, match=r"batch_first is a int; expected True \| False"):
            make()
    with pytest.raises(
        ValueError, match=r"x is of shape \(4, 16\); expected \[length, batch, 16\]"
    ):
        of_nnx.MultiHeadAttention(2, D, batch_first=False, rngs=nnx.Rngs(0))(jnp.ones((4, D)))
