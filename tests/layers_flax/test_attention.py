"""Attention and rotary positions against float64; masks; when cuDNN computes it."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardops.layers import attention_cudnn
from shardops.layers.attention import attention, rotary
from tests import cases, meshes
from tests.closeness import assert_close
from tests.fuzz.amount import EXHAUSTIVE
from tests.layers_flax import plain

B, Q, K, HEADS, D = 2, 6, 6, 4, 16
LENGTHS = np.array([4, 0], np.int32)  # of the second sequence nothing is seen


def drawn(rng, kv=HEADS, keys=K, dtype="float32"):
    shapes = ((B, Q, HEADS, D), (B, keys, kv, D), (B, keys, kv, D), (B, Q, HEADS, D))
    return [cases.random(rng, shape, dtype) for shape in shapes]


def options_of(name, rng):
    mask = rng.random((B, 1, Q, K)) < 0.7
    return {
        "none": ({}, {}),
        "causal": ({"mask_kind": "causal"}, {"causal": True}),
        "padding": ({"mask_kind": "padding", "lengths": LENGTHS}, {"lengths": LENGTHS}),
        "both": (
            {"mask_kind": "padding_causal", "lengths": LENGTHS},
            {"causal": True, "lengths": LENGTHS},
        ),
        "mask": ({"mask": mask, "mask_kind": "causal"}, {"causal": True, "mask": mask}),
        "every head": (
            {"mask": np.repeat(mask, HEADS, 1) ^ (np.arange(HEADS) == 1)[:, None, None]},
            {"mask": np.repeat(mask, HEADS, 1) ^ (np.arange(HEADS) == 1)[:, None, None]},
        ),
    }[name]


MASKS = ["none", "causal", "padding", "both", "mask", "every head"]
GROUPED = [(mask, kv) for mask in MASKS for kv in (4, 2, 1)]


@pytest.mark.parametrize(
    ("kind", "kv"), GROUPED if EXHAUSTIVE else [*zip(MASKS, (1, 4, 2, 1, 4, 2), strict=True)]
)
def test_attention_and_its_gradients(rng, kind, kv):
    dtype = "bfloat16" if kv == 1 else "float32"
    q, k, v, cotangent = drawn(rng, kv, dtype=dtype)
    ours, formula = options_of(kind, rng)
    seen = plain.seen_by(Q, K, formula.pop("causal", False), **formula)

    def reference(q, k, v):
        return plain.attention(q, *(jnp.repeat(a, HEADS // kv, 2) for a in (k, v)), seen)

    @jax.jit
    def run(q, k, v, cotangent):
        value, pull = jax.vjp(lambda *qkv: attention(*qkv, **ours), q, k, v)
        return value, pull(cotangent)

    value, gradients = run(q, k, v, cotangent)
    want, cotangents = plain.in_float64(reference, cotangent, q, k, v)
    assert_close(value, want, reduced=K + D, roundings=4, what="value")
    for name, got, w in zip("qkv", gradients, cotangents, strict=True):
        assert_close(got, w, reduced=HEADS * Q + D, roundings=8, what=f"gradient of {name}")


def test_cross_attention_of_another_length(rng):
    q, k, v, cotangent = drawn(rng, kv=2, keys=9)
    both = (jnp.repeat(a, 2, 2) for a in (k, v))
    want, _ = plain.in_float64(
        lambda q, k, v: plain.attention(q, k, v, plain.seen_by(Q, 9, False)), cotangent, q, *both
    )
    assert_close(attention(q, k, v), want, reduced=9 + D, roundings=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_positions(rng, dtype):
    x = cases.random(rng, (B, Q, HEADS, D), dtype)
    want, _ = plain.in_float64(lambda x: plain.rotated(x, 1e4), x, x)
    assert_close(rotary(x, 1e4), want, reduced=4)
    shifted = rotary(x, 1e4, jnp.arange(Q) + jnp.array([[0], [0]]))
    np.testing.assert_array_equal(shifted, rotary(x, 1e4))


def test_scores_of_rotated_vectors_depend_on_distance_alone(rng):
    q, k, *_ = drawn(rng)

    def scores(at):
        turned = (rotary(a, 100.0, jnp.arange(Q) + at) for a in (q, k))
        return jnp.einsum("bqhd,bkhd->bhqk", *turned)

    assert_close(scores(7), np.asarray(scores(0), np.float64), reduced=64)


# ---- cuDNN ---------------------------------------------------------------------------------------


def taken(q=(B, Q, HEADS, D), k=(B, K, HEADS, D), dtype="bfloat16", implementation=None, **options):
    q, k = (jnp.zeros(shape, dtype) for shape in (q, k))
    options = {"causal": False, "masked": False, **options}
    return attention_cudnn.taken(implementation, q, k, **options)


def test_cudnn_is_taken_where_it_fits():
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        assert taken()
        assert taken(causal=True)
        assert taken(dtype="float16")
        assert not taken(dtype="float32")
        assert not taken(q=(B, Q, HEADS, 12), k=(B, K, HEADS, 12))
        assert not taken(q=(B, Q, HEADS, 136), k=(B, K, HEADS, 136))
        assert not taken(k=(B, K + 1, HEADS, D), causal=True)
        assert not taken(masked=True)
        assert not taken(implementation="softmax")
    assert not taken()


def test_cudnn_asked_for_where_it_does_not_fit_says_why(rng):
    q, k, v, _ = drawn(rng)
    with pytest.raises(NotImplementedError, match=r'implementation is "cudnn".*float32'):
        attention(q, k, v, implementation="cudnn")
    wide = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)]
    with pytest.raises(NotImplementedError, match="the backend is cpu"):
        attention(*wide, implementation="cudnn")


@pytest.mark.parametrize("kind", ["none", "auto", "explicit"])
@pytest.mark.parametrize("padded", [False, True])
def test_cudnn_is_called_on_each_devices_heads(kind, padded):
    """Lowered for a CUDA device: one call forward, one backward. On Explicit axes of the shards; on
    Auto axes JAX's own rule partitions them."""
    lengths = {"mask_kind": "padding_causal", "lengths": jnp.full(B, Q)} if padded else {}
    q, k = (jnp.zeros((B, Q, heads, D), jnp.bfloat16) for heads in (8, 4))
    text = _lowered_for_cuda(kind, lengths, q, k)
    if kind == "auto":
        assert text.count("@CustomSPMDPartitioning(") == 2
        return
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmax" in line]
    assert [("Backward(" in call) for call in calls] == [False, True]
    shape = "1x6x2x16" if kind == "explicit" else "2x6x8x16"  # a batch of 2 over dp, 8 heads over 4
    assert all(f"tensor<{shape}xbf16>" in call for call in calls)


def _lowered_for_cuda(kind, lengths, q, k):
    module = "jax._src.cudnn.fused_attention_stablehlo"

    def f(q, k):
        return jnp.sum(attention(q, k, k, **lengths).astype(jnp.float32))

    def lower(*arrays):
        traced = jax.jit(jax.grad(f, (0, 1))).trace(*arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch(f"{module}.check_cudnn_version", return_value=91000),
        mock.patch(f"{module}.check_compute_capability", return_value=True),
        mock.patch(f"{module}.is_cuda_compute_capability_equal", return_value=False),
    ):
        if kind == "none":
            return lower(q, k)
        with meshes.entered(kind) as mesh:
            at = NamedSharding(mesh, P("dp", None, "tp"))
            return lower(*(jax.device_put(a, at) for a in (q, k)))
