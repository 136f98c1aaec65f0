"""The ops of the matrix: a call of each, the same in plain jnp, operands and where they lie."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardops as so
from shardops.primitives.softmax import softmax
from tests import cases

Layout = tuple[str | None, ...]

SCORES = (((2,), (2,)), ((0,), (0,)))  # q [b, s, d], k [b, t, d] -> [b, s, t]


@dataclass(frozen=True)
class Subject:
    """An op as a function of arrays to one array. dp shards rows alone, and those of the result.

    `layouts` have an axis tp that the op has to communicate over, `mapped` ones where each device's
    part is the op on its shards; the last of each is that of the result.
    """

    name: str
    call: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    mapped: tuple[Layout, ...]

    def operands(self) -> list[np.ndarray]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return [cases.random(rng, shape, scale=0.5) for shape in self.shapes]


def _gemm(x: Any, w: Any, bias: Any) -> jax.Array:
    return so.gemm(x, w, bias=bias, activation="gelu")


def _dot_general(q: Any, k: Any) -> jax.Array:
    return so.dot_general(q, k, SCORES)


def _rms_norm(x: Any, gamma: Any, add: Any) -> jax.Array:
    y, h = so.rms_norm(x, gamma, add=add, return_input=True)
    return y * h


def _softmax(x: Any) -> jax.Array:
    return softmax(x, causal="bottom_right")


def _plain_softmax(x: Any) -> jax.Array:
    queries, keys = x.shape[-2:]
    seen = jnp.tril(jnp.ones((queries, keys), bool), keys - queries)
    return jax.nn.softmax(x, where=seen)


def _plain_layer_norm(x: Any, gamma: Any, beta: Any) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-6) * gamma + beta


def _plain_rms_norm(x: Any, gamma: Any, add: Any) -> jax.Array:
    h = x + add
    return h / jnp.sqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-6) * gamma * h


_ROWS = (4, 8, 16)
_HIDDEN = ("dp", None, "tp")
_SEQUENCE = ("dp", "tp")

SUBJECTS = (
    Subject(
        "gemm",
        _gemm,
        lambda x, w, bias: jax.nn.gelu(x @ w + bias),
        (_ROWS, (16, 8), (8,)),
        (_HIDDEN, ("tp",), (), ("dp",)),
        (("dp",), (None, "tp"), ("tp",), _HIDDEN),
    ),
    Subject(
        "dot_general",
        _dot_general,
        lambda q, k: jax.lax.dot_general(q, k, SCORES),
        (_ROWS, (4, 6, 16)),
        (_HIDDEN, _HIDDEN, ("dp",)),
        (_SEQUENCE, ("dp",), _SEQUENCE),
    ),
    Subject(
        "layer_norm",
        so.layer_norm,
        _plain_layer_norm,
        (_ROWS, (16,), (16,)),
        (_HIDDEN, ("tp",), (), _HIDDEN),
        (_SEQUENCE, (), (), _SEQUENCE),
    ),
    Subject(
        "rms_norm",
        _rms_norm,
        _plain_rms_norm,
        (_ROWS, (16,), _ROWS),
        (_SEQUENCE, (), _SEQUENCE, _SEQUENCE),
        (_SEQUENCE, (), _SEQUENCE, _SEQUENCE),
    ),
    Subject(
        "softmax",
        _softmax,
        _plain_softmax,
        ((4, 8, 4, 6),),
        (_SEQUENCE, _SEQUENCE),
        (_SEQUENCE, _SEQUENCE),
    ),
)
