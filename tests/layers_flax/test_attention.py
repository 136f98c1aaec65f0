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


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch", "sequence"])
@pytest.mark.parametrize(
    ("kind", "kv"), GROUPED if EXHAUSTIVE else [*zip(MASKS, (1, 4, 2, 1, 4, 2), strict=True)]
)
def test_attention_and_its_gradients(rng, kind, kv, batch_first):
    dtype = "bfloat16" if kv == 1 else "float32"
    q, k, v, cotangent = drawn(rng, kv, dtype=dtype)
    ours, formula = options_of(kind, rng)
    seen = plain.seen_by(Q, K, formula.pop("causal", False), **formula)

    def reference(q, k, v):
        return plain.attention(q, *(jnp.repeat(a, HEADS // kv, 2) for a in (k, v)), seen)

    def by_us(*qkv):
        if batch_first:
            return attention(*qkv, **ours)
        qkv = (a.swapaxes(0, 1) for a in qkv)
        return attention(*qkv, batch_first=False, **ours).swapaxes(0, 1)

    @jax.jit
    def run(q, k, v, cotangent):
        value, pull = jax.vjp(by_us, q, k, v)
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
    q, k, v = (a.swapaxes(0, 1) for a in (q, k, v))
    got = attention(q, k, v, batch_first=False).swapaxes(0, 1)
    assert_close(got, want, reduced=9 + D, roundings=4)


def test_scores_beyond_the_range_of_float16(rng):
    """Before they are divided by sqrt(d): 40 * 40 * 128 is more than the 65504 that there are."""
    q, v = (cases.random(rng, (1, 7, 2, 128), "float16", scale) for scale in (40.0, 1.0))

    @jax.jit
    def run(q, v):
        value, pull = jax.vjp(lambda q, v: attention(q, q, v), q, v)
        return value, pull(v)

    value, gradients = run(q, v)
    seen = plain.seen_by(7, 7, False)
    want, cotangents = plain.in_float64(lambda q, v: plain.attention(q, q, v, seen), v, q, v)
    # Of scores up to 20000 a rounding is 8: weights are those of the largest score.
    assert_close(value, want, reduced=128, roundings=4)
    assert np.isfinite(np.asarray(gradients[0])).all()
    assert_close(gradients[1], cotangents[1], reduced=128, roundings=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_positions(rng, dtype):
    x = cases.random(rng, (B, Q, HEADS, D), dtype)
    want, _ = plain.in_float64(lambda x: plain.rotated(x, 1e4), x, x)
    assert_close(rotary(x, 1e4), want, reduced=4)
    shifted = rotary(x, 1e4, jnp.arange(Q) + jnp.array([[0], [0]]))
    np.testing.assert_array_equal(shifted, rotary(x, 1e4))
    for at in (None, jnp.arange(Q) + 3, jnp.arange(Q) + jnp.array([[2], [7]])):
        turned = rotary(x.swapaxes(0, 1), 1e4, at, batch_first=False)
        np.testing.assert_array_equal(turned.swapaxes(0, 1), rotary(x, 1e4, at))


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
@pytest.mark.parametrize(("padded", "batch_first"), [(False, True), (True, True), (True, False)])
def test_cudnn_is_called_on_each_devices_heads(kind, padded, batch_first):
    """Lowered for a CUDA device: one call forward, one backward. On Explicit axes of the shards; on
    Auto axes JAX's own rule partitions them."""
    lengths = {"mask_kind": "padding_causal", "lengths": jnp.full(B, Q)} if padded else {}
    rows = (B, Q) if batch_first else (Q, B)
    q, k = (jnp.zeros((*rows, heads, D), jnp.bfloat16) for heads in (8, 4))
    text = _lowered_for_cuda(kind, {**lengths, "batch_first": batch_first}, q, k)
    if kind == "auto":
        assert text.count("@CustomSPMDPartitioning(") == 2
        return
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmax" in line]
    assert [("Backward(" in call) for call in calls] == [False, True]
    shape = "1x6x2x16" if kind == "explicit" else "2x6x8x16"  # a batch of 2 over dp, 8 heads over 4
    assert all(f"tensor<{shape}xbf16>" in call for call in calls)


def _lowered_for_cuda(kind, options, q, k):
    module = "jax._src.cudnn.fused_attention_stablehlo"

    def f(q, k):
        return jnp.sum(attention(q, k, k, **options).astype(jnp.float32))

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
            rows = ("dp", None) if options["batch_first"] else (None, "dp")
            at = NamedSharding(mesh, P(*rows, "tp"))
            return lower(*(jax.device_put(a, at) for a in (q, k)))
