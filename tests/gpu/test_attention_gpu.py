"""Attention on a GPU against float64: cuDNN's where it fits, products and softmax elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardops.layers import nnx as layers
from shardops.layers.attention import attention
from tests import cases
from tests.closeness import assert_close
from tests.layers_flax import plain

BATCH, HEADS = 3, 8
CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


def drawn(rng, dtype, queries, keys, kv_heads, d):
    shapes = [(BATCH, queries, HEADS, d), *[(BATCH, keys, kv_heads, d)] * 2]
    return [cases.random(rng, shape, dtype) for shape in (*shapes, shapes[0])]


def value_and_cotangents(q, k, v, cotangent, **options):
    """What attention computes forward and backward, and the program that does."""

    def run(q, k, v, cotangent):
        value, pull = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
        return value, *pull(cotangent)

    program = jax.jit(run).lower(q, k, v, cotangent).compile()
    return program(q, k, v, cotangent), program.as_text()


def in_float64(q, k, v, cotangent, seen):
    def formula(q, k, v):
        return plain.attention(q, *(jnp.repeat(a, HEADS // a.shape[2], 2) for a in (k, v)), seen)

    value, cotangents = plain.in_float64(formula, cotangent, q, k, v)
    return value, *cotangents


def check(got, want, *, keys, d, group):
    """Stored in 16 bits on the way to the value are the weights; to a gradient those, the value,
    the gradient of the scores, and of keys that serve a group one sum a head."""
    value, *gradients = zip(got, want, strict=True)
    assert_close(*value, reduced=keys + d, roundings=2, what="value")
    for name, pair in zip("qkv", gradients, strict=True):
        assert_close(*pair, reduced=keys * group + d, roundings=4, what=f"gradient of {name}")


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "padding_causal"])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "length", "d"),
    [
        ("bfloat16", 8, 256, 64),
        ("bfloat16", 2, 192, 128),
        ("float16", 1, 77, 40),
    ],
)
def test_cudnn_computes_attention_and_its_gradients(rng, kind, dtype, kv_heads, length, d):
    q, k, v, cotangent = drawn(rng, dtype, length, length, kv_heads, d)
    lengths = np.array([length, length // 3, 0], np.int32)  # of the last sequence nothing is seen
    padding = {"lengths": lengths} if kind.startswith("padding") else {}
    got, text = value_and_cotangents(q, k, v, cotangent, mask_kind=kind, **padding)
    fits = length % 2 == 0
    assert [f'custom_call_target="{name}"' in text for name in CUDNN] == [fits, fits]
    seen = plain.seen_by(length, length, kind.endswith("causal"), **padding)
    want = in_float64(q, k, v, cotangent, seen)
    check(got, want, keys=length, d=d, group=HEADS // kv_heads)


def test_cudnn_takes_keys_of_another_length(rng):
    q, k, v, cotangent = drawn(rng, "bfloat16", 64, 144, 4, 64)
    got, text = value_and_cotangents(q, k, v, cotangent, implementation="cudnn")
    assert all(f'custom_call_target="{name}"' in text for name in CUDNN)
    want = in_float64(q, k, v, cotangent, plain.seen_by(64, 144, causal=False))
    check(got, want, keys=144, d=64, group=2)


@pytest.mark.parametrize("why", ["mask", "causal with more keys", "features", "asked for"])
def test_elsewhere_products_and_softmax_compute_it(rng, why):
    queries, keys, d = (
        96,
        96 + 32 * (why == "causal with more keys"),
        136 if why == "features" else 64,
    )
    q, k, v, cotangent = drawn(rng, "bfloat16", queries, keys, 4, d)
    causal = why == "causal with more keys"
    mask = rng.random((BATCH, 1, queries, keys)) < 0.7 if why == "mask" else None
    got, text = value_and_cotangents(
        q,
        k,
        v,
        cotangent,
        mask_kind="causal" if causal else "none",
        mask=mask,
        implementation="softmax" if why == "asked for" else None,
    )
    assert "__cudnn$fmha" not in text
    assert "shardops_gemm" in text
    want = in_float64(q, k, v, cotangent, plain.seen_by(queries, keys, causal, mask=mask))
    value, *gradients = zip(got, want, strict=True)
    # Scores too are stored in 16 bits here, up to 4 of them in what is exponentiated.
    assert_close(*value, reduced=keys + d, roundings=4, what="value")
    for name, pair in zip("qkv", gradients, strict=True):
        assert_close(*pair, reduced=2 * keys + d, roundings=8, what=f"gradient of {name}")


def test_the_module_takes_cudnn(rng):
    """Grouped queries, rotary positions and a causal mask, of one product's output."""
    made = layers.MultiHeadAttention(
        HEADS,
        256,
        num_kv_heads=2,
        rope_theta=1e4,
        mask_kind="causal",
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    graph, params = nnx.split(made)
    x, cotangent = (cases.random(rng, (BATCH, 128, 256), "bfloat16") for _ in range(2))

    def run(params, x, cotangent):
        value, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return value, pull(cotangent)

    program = jax.jit(run).lower(params, x, cotangent).compile()
    assert all(f'custom_call_target="{name}"' in program.as_text() for name in CUDNN)
    value, (dparams, dx) = program(params, x, cotangent)
    model = plain.Model(causal=True, rope_theta=1e4)
    of = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.to_pure_dict(params))
    want, (dwant, dx_want) = plain.in_float64(
        lambda of, x: plain.self_attention(x, of, model), cotangent, of, x
    )
    assert_close(value, want, reduced=256, roundings=6, what="value")
    assert_close(dx, dx_want, reduced=256, roundings=8, what="gradient of x")
    got = nnx.to_pure_dict(dparams)
    for name, of_name in dwant.items():
        for leaf, wanted in of_name.items():
            assert_close(
                got[name][leaf].astype(jnp.bfloat16),
                wanted,
                reduced=BATCH * 128,
                roundings=8,
                what=f"gradient of {name} {leaf}",
            )
