"""A decoder-only transformer whose fusions are written out by hand, or taken apart again.

    y, s = rms_norm(branch, gamma, add=s, return_input=True)    s = s + branch, y = norm(s)

Pre-norm, the residual stream is carried by the norms themselves. Tensor, sequence and data
parallel, said by specs alone: between blocks the stream is sharded over batch (dp) and sequence
(tp); the products into a block are split by columns, those out of it by rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardops as so

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Ops:
    """Who computes norms and products."""

    gemm: Callable[..., Any]
    rms_norm: Callable[..., Any]


STREAM = P("dp", "tp", None)  # [batch, seq, dim]
HEADS = P("dp", None, None, "tp", None)  # [batch, seq, 3, heads, dim / heads]
HIDDEN = P("dp", None, "tp")  # [batch, seq, 4 dim]


def _norm_apart(x, gamma, *, add=None, return_input=False, epsilon=1e-6):
    h = x if add is None else x + add
    y = so.rms_norm(h, gamma, epsilon=epsilon)
    return (y, h) if return_input else y


def _gemm_apart(lhs, rhs, *, bias=None, activation=None, **options):
    out = so.gemm(lhs, rhs, **options)
    out = out if bias is None else out + bias
    return out if activation is None else getattr(jax.nn, activation)(out)


BY_HAND = Ops(so.gemm, so.rms_norm)
APART = Ops(_gemm_apart, _norm_apart)


def parameters(*, dim: int, layers: int, heads: int, seq: int, vocabulary: int, seed: int) -> Any:
    """Host arrays: normal, scaled by fan-in; the projections into the stream also by depth."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * gain / fan_in**0.5).astype(np.float32)

    def layer() -> dict[str, np.ndarray]:
        gain = (2 * layers) ** -0.5
        return {
            "attention_gamma": np.ones(dim, np.float32),
            "qkv": normal(dim, 3, heads, dim // heads, fan_in=dim),
            "projection": normal(heads, dim // heads, dim, fan_in=dim, gain=gain),
            "mlp_gamma": np.ones(dim, np.float32),
            "up": normal(dim, 4 * dim, fan_in=dim),
            "up_bias": np.zeros(4 * dim, np.float32),
            "down": normal(4 * dim, dim, fan_in=4 * dim, gain=gain),
            "down_bias": np.zeros(dim, np.float32),
        }

    return {
        "embedding": normal(vocabulary, dim, fan_in=1, gain=0.1),
        "position": normal(seq, dim, fan_in=1, gain=0.1),
        "layers": [layer() for _ in range(layers)],
        "gamma": np.ones(dim, np.float32),
        "head": normal(dim, vocabulary, fan_in=dim, gain=0.5),
    }


def specs(layers: int) -> Any:
    """The sharding of every parameter: columns and rows over tp, the rest on every device."""
    layer = {
        "attention_gamma": P(None),
        "qkv": P(None, None, "tp", None),
        "projection": P("tp", None, None),
        "mlp_gamma": P(None),
        "up": P(None, "tp"),
        "up_bias": P("tp"),
        "down": P("tp", None),
        "down_bias": P(None),
    }
    return {
        "embedding": P(None, None),
        "position": P("tp", None),
        "layers": [layer] * layers,
        "gamma": P(None),
        "head": P(None, None),
    }


def loss(params: Parameters, inputs: jax.Array, targets: jax.Array, ops: Ops) -> jax.Array:
    """Mean cross-entropy in nats a character."""
    logits = _logits(params, inputs, ops)
    picked = targets[..., None] == jnp.arange(logits.shape[-1])
    target = jnp.sum(jnp.where(picked, logits, 0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - target)


def _logits(params: Parameters, inputs: jax.Array, ops: Ops) -> jax.Array:
    """[batch, seq, vocabulary]; each device keeps its part of the sequence, so nothing moves."""
    embedded = params["embedding"].at[inputs].get(out_sharding=STREAM)
    branch, stream = embedded + params["position"], None
    for layer in params["layers"]:
        y, stream = ops.rms_norm(branch, layer["attention_gamma"], add=stream, return_input=True)
        branch = _attention(layer, y, ops)
        y, stream = ops.rms_norm(branch, layer["mlp_gamma"], add=stream, return_input=True)
        branch = _mlp(layer, y, ops)
    y = ops.rms_norm(branch, params["gamma"], add=stream)
    return ops.gemm(y, params["head"])


def _attention(layer: Parameters, y: jax.Array, ops: Ops) -> jax.Array:
    qkv = ops.gemm(y, layer["qkv"], out_sharding=HEADS)
    q, k, v = (qkv[:, :, part] for part in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return ops.gemm(
        mixed, layer["projection"], contracting_dims=((2, 3), (0, 1)), out_sharding=STREAM
    )


def _mlp(layer: Parameters, y: jax.Array, ops: Ops) -> jax.Array:
    hidden = ops.gemm(y, layer["up"], bias=layer["up_bias"], activation="gelu", out_sharding=HIDDEN)
    return ops.gemm(hidden, layer["down"], bias=layer["down_bias"], out_sharding=STREAM)
