"""The same model in plain jnp, for the comparison on one device. Shardings do not apply."""

from typing import Any

import jax
import jax.numpy as jnp


def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats a character, of the parameters of `model.Model`."""
    x = params["embedding"][inputs] + params["position"]
    for _, layer in sorted(params["layers"].items()):
        x = x + _attention(layer["attention"], _rms_norm(x, layer["attention_norm"]))
        x = x + _mlp(layer["mlp"], _rms_norm(x, layer["mlp"]["norm"]))
    return cross_entropy(_rms_norm(x, params["norm"]) @ params["head"]["kernel"], targets)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over all characters, in float32."""
    logits = logits.astype(jnp.float32)
    picked = targets[..., None] == jnp.arange(logits.shape[-1])
    target = jnp.sum(jnp.where(picked, logits, 0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - target)


def _rms_norm(x: jax.Array, of: Any, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x²) + epsilon) · scale."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon) * of["scale"]


def _dense(x: jax.Array, of: Any, dims: int = 1) -> jax.Array:
    return jnp.tensordot(x, of["kernel"], dims) + of["bias"]


def _attention(of: Any, y: jax.Array) -> jax.Array:
    q, k, v = (_dense(y, of[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return _dense(jnp.einsum("bhqk,bkhd->bqhd", weights, v), of["out"], dims=2)


def _mlp(of: Any, y: jax.Array) -> jax.Array:
    return _dense(jax.nn.gelu(_dense(y, of["up"]), approximate=True), of["down"])
