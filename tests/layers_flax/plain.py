"""A transformer layer in float64 by the formulas alone: numpy, einsum and loops over nothing.

Gradients by JAX's own derivative of jnp in float64; nothing of the library is in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Model:
    """What of a layer is not a parameter."""

    norm: str = "rms_norm"
    activation: Any = "gelu"
    causal: bool = True
    rope_theta: float | None = None


def normed(x, of, kind):
    if kind == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * of["scale"]
    return y + of["bias"] if "bias" in of else y


def dense(x, of, equation):
    y = jnp.einsum(equation, x, of["kernel"])
    return y + of["bias"] if "bias" in of else y


def rotated(x, theta):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)[:, None, :]
    return jnp.concatenate([turned.real, turned.imag], -1)


def attention(q, k, v, seen):
    """Of [b, q, h, d] to [b, k, h, d]; seen broadcasts to [b, h, q, k]. Blind queries get 0."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", weights / jnp.where(total == 0, 1, total), v)


def seen_by(q, k, causal, lengths=None, mask=None):
    seen = np.ones((1, 1, q, k), bool)
    if causal:
        seen = seen & (np.arange(k)[None] <= np.arange(q)[:, None])
    if lengths is not None:
        seen = seen & (np.arange(k) < np.asarray(lengths)[:, None, None, None])
    return seen if mask is None else seen & np.asarray(mask)


def self_attention(x, of, model, lengths=None, mask=None):
    q, k, v = (dense(x, of[n], "bsd,dhf->bshf") for n in ("query", "key", "value"))
    if model.rope_theta is not None:
        q, k = rotated(q, model.rope_theta), rotated(k, model.rope_theta)
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    seen = seen_by(x.shape[1], x.shape[1], model.causal, lengths, mask)
    return dense(attention(q, k, v, seen), of["out"], "bshf,hfd->bsd")


_ACTIVATIONS = {
    "gelu": lambda z: jax.nn.gelu(z, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "linear": lambda z: z,
}


def mlp(x, of, model):
    y = normed(x, of["norm"], model.norm)
    if isinstance(model.activation, tuple):
        up = dense(y, of["up"], "bsd,dgf->bsgf")
        one, other = (_ACTIVATIONS[name] for name in model.activation)
        hidden = one(up[:, :, 0]) * other(up[:, :, 1])
    else:
        hidden = _ACTIVATIONS[model.activation](dense(y, of["up"], "bsd,df->bsf"))
    return dense(hidden, of["down"], "bsf,fd->bsd")


def layer(params, x, model, lengths=None, mask=None):
    y = normed(x, params["attention_norm"], model.norm)
    x = x + self_attention(y, params["attention"], model, lengths, mask)
    return x + mlp(x, params["mlp"], model)


def in_float64(function: Callable[..., Any], cotangent: Any, *arrays: Any) -> tuple[Any, Any]:
    """The value, and the cotangents of the arrays, as float64 numpy."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a).astype(np.float64)), arrays)
        value, pull = jax.vjp(function, *wide)
        cotangents = pull(jnp.asarray(np.asarray(cotangent).astype(np.float64)))
        return np.asarray(value), jax.tree.map(np.asarray, cotangents)
