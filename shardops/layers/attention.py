"""Attention of queries to keys, by products and softmax or by cuDNN, and rotary positions."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardops.errors import wrong
from shardops.layers import attention_cudnn
from shardops.primitives import check
from shardops.primitives.dot import dot_general
from shardops.primitives.softmax import softmax

MaskKind = Literal["none", "causal", "padding", "padding_causal"]
MASK_KINDS = ("none", "causal", "padding", "padding_causal")
Implementation = Literal["cudnn", "softmax"] | None


@dataclass(frozen=True)
class Masking:
    """Which keys a query sees.

    Attributes:
      kind: "none": all; "causal": query i sees keys 0 ... i; "padding": keys up to `lengths` of
        their sequence; "padding_causal": what both show.
      lengths: int32 [batch], with the kinds of padding.
      mask: bool, True where a query sees a key (as in Flax); its shape broadcasts to
        [batch, heads, q, k], each dim 1 or whole. Hides further keys, whatever the kind.
    """

    kind: MaskKind = "none"
    lengths: jax.Array | None = None
    mask: jax.Array | None = None

    @property
    def causal(self) -> bool:
        return self.kind in ("causal", "padding_causal")

    @property
    def padded(self) -> bool:
        return self.kind in ("padding", "padding_causal")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask_kind: MaskKind = "none",
    lengths: jax.Array | None = None,
    mask: jax.Array | None = None,
    implementation: Implementation = None,
    batch_first: bool = True,
) -> jax.Array:
    """Mix values by how well their keys fit the queries.

        out[b, q, n] = sum_k w[b, q, n, k] value[b, k, n // r]
        w[b, q, n, k] = softmax_k(query[b, q, n] · key[b, k, n // r] / sqrt(d))

    r = heads / kv_heads queries share a key (grouped queries). Over the keys that are seen; a query
    that sees none gets zeros.

    Args:
      query: [batch, q, heads, d] float32 | bfloat16 | float16.
      key, value: [batch, k, kv_heads, d], dtype of query.
      mask_kind, lengths, mask: as in `Masking`.
      implementation: "softmax": `so.dot_general` and `so.softmax`. "cudnn": the flash attention of
        `jax.nn.dot_product_attention`. None: cuDNN where it fits (a CUDA backend, 16-bit dtypes, d
        a multiple of 8 up to 128, no `mask`, even numbers of queries and keys, as many of both
        where it is causal), else softmax.
      batch_first: False: query, key, value and the result are [sequence, batch, heads, d]. What
        `Masking` says of its arrays holds as it is.
    Returns: [batch, q, heads, d], dtype of query.
    Raises: ValueError for shapes, mask kinds and lengths that do not fit, NotImplementedError where
      cuDNN is asked for and does not fit.
    Sharding: batch and heads (those of query and key alike): any axes, no communication. Sequences
      and d: whole.
    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; groups: Ainslie et al. 2023,
      https://arxiv.org/abs/2305.13245
    """
    query, key, value = check.arrays("attention", query=query, key=key, value=value)
    dims = (0, 1) if check.flag("attention", "batch_first", batch_first) else (1, 0)
    _check_shapes(query, key, value, dims)
    masking = _masking(mask_kind, lengths, mask, query, key, dims)
    check.one_of("attention", "implementation", implementation, (None, "cudnn", "softmax"))
    given = mask is not None
    if attention_cudnn.taken(implementation, query, key, masking.causal, given, dims[1]):
        with jax.named_scope("shardops.attention"):
            if not batch_first:
                query, key, value = (jnp.swapaxes(a, 0, 1) for a in (query, key, value))
            mixed = attention_cudnn.attention(query, key, value, masking.causal, masking.lengths)
            return mixed if batch_first else jnp.swapaxes(mixed, 0, 1)
    return _by_softmax(query, key, value, masking, dims)


def _by_softmax(
    q: jax.Array, k: jax.Array, v: jax.Array, masking: Masking, dims: tuple[int, int]
) -> jax.Array:
    """Groups of queries as a dim of their own, so that keys are read where they are.

    dims: of batch and sequence.
    """
    batch, sequence = dims
    heads, d = q.shape[2:]
    groups, scale = k.shape[2], d**-0.5
    if q.dtype == jnp.float16:  # whose range the products of unscaled queries leave
        q, scale = q * jnp.float16(scale), 1.0
    grouped = jnp.reshape(q, (*q.shape[:2], groups, heads // groups, d))
    grouped = jnp.transpose(grouped, (batch, 2, 3, sequence, 4))
    scores = dot_general(grouped, k, (((4,), (3,)), ((0, 1), (batch, 2))))  # [b, g, r, q, k]
    weights = softmax(
        scores,
        scale=scale,
        mask=_hidden(masking, groups, heads // groups, k.shape[sequence]),
        causal="upper_left" if masking.causal else None,
    )
    mixed = dot_general(weights, v, (((4,), (sequence,)), ((0, 1), (batch, 2))))  # [b, g, r, q, d]
    first = (0, 3) if batch == 0 else (3, 0)
    return jnp.reshape(jnp.transpose(mixed, (*first, 1, 2, 4)), q.shape)


def _hidden(masking: Masking, groups: int, ratio: int, keys: int) -> jax.Array | None:
    """True where a key is hidden by `lengths` or `mask`, broadcasting to [b, g, r, q, k]."""
    hidden = None
    if masking.padded and masking.lengths is not None:
        hidden = jnp.arange(keys) >= masking.lengths[:, None, None, None, None]
    if masking.mask is not None:
        batch, heads, *rest = masking.mask.shape
        split = (1, 1) if heads == 1 else (groups, ratio)
        unseen = jnp.logical_not(jnp.reshape(masking.mask, (batch, *split, *rest)))
        hidden = unseen if hidden is None else jnp.logical_or(hidden, unseen)
    return hidden


def rotary(
    x: jax.Array,
    theta: float,
    positions: jax.Array | None = None,
    *,
    batch_first: bool = True,
) -> jax.Array:
    """Turn pairs of features by an angle that grows with the position.

        y[..., i]         = x[..., i] cos(a_i) - x[..., i + d/2] sin(a_i)
        y[..., i + d/2]   = x[..., i + d/2] cos(a_i) + x[..., i] sin(a_i),  a_i = p theta^(-2i/d)

    In float32, rounded once. The halves are paired as in Flax's `nnx.RoPE`.

    Args:
      x: [batch, length, heads, d], d even.
      theta: base of the wave lengths.
      positions: [batch, length] or [length]; None: 0 ... length - 1.
      batch_first: False: x is [length, batch, heads, d].
    Returns: like x.
    Sharding: batch, heads: any axes, no communication.
    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864
    """
    batch, length = x.shape[:2] if batch_first else x.shape[1::-1]
    d = x.shape[-1]
    if d % 2:
        fix = "Rotary positions turn pairs: take an even head_dim."
        raise ValueError(wrong("rotary", "x", f"of shape {x.shape}", "an even last dim", fix))
    at = jnp.arange(length) if positions is None else positions
    if at.shape not in ((length,), (batch, length)):
        want = f"({batch}, {length}) or ({length},)"
        fix = "One position a token."
        raise ValueError(wrong("rotary", "positions", f"of shape {at.shape}", want, fix))
    if not any(jnp.issubdtype(at.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        fix = "Positions are numbers of tokens."
        raise TypeError(
            wrong("rotary", "positions", f"of dtype {at.dtype}", "integers or floats", fix)
        )
    frequency = theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    at = at.astype(jnp.float32)
    if not batch_first:
        at = at[:, None] if at.ndim == 1 else at.T
    angle = at[..., None, None] * frequency  # [(batch,) length, 1, d / 2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _check_shapes(
    query: jax.Array, key: jax.Array, value: jax.Array, dims: tuple[int, int]
) -> None:
    for name, array in (("query", query), ("key", key)):
        if array.ndim != 4:
            fix = "Give it one dim of each."
            want = "[batch, length, heads, d]" if dims[0] == 0 else "[length, batch, heads, d]"
            raise ValueError(wrong("attention", name, f"of shape {array.shape}", want, fix))
    check.shape("attention", "value", value, key.shape)
    if any(query.shape[d] != key.shape[d] for d in (dims[0], 3)):
        want = f"batch and d of query {query.shape}"
        fix = "Queries and keys have the same batch and d."
        raise ValueError(wrong("attention", "key", f"of shape {key.shape}", want, fix))
    if key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        want = f"a number of heads that divides the {query.shape[2]} of query"
        fix = "Each key serves a whole group of queries."
        raise ValueError(wrong("attention", "key", f"of shape {key.shape}", want, fix))
    if not query.dtype == key.dtype == value.dtype:
        got = f"of dtypes {query.dtype}, {key.dtype} and {value.dtype}"
        raise TypeError(wrong("attention", "query, key, value", got, "one dtype", "Cast them."))


def _masking(
    kind: Any,
    lengths: Any,
    mask: Any,
    query: jax.Array,
    key: jax.Array,
    dims: tuple[int, int],
) -> Masking:
    check.one_of("attention", "mask_kind", kind, MASK_KINDS)
    masking = Masking(kind, lengths, mask)
    if masking.padded != (lengths is not None):
        got = "None" if lengths is None else "given"
        want = "int32 [batch]" if lengths is None else f'None with mask_kind="{kind}"'
        fix = 'Lengths go with mask_kind="padding" and "padding_causal".'
        raise ValueError(wrong("attention", "lengths", got, want, fix))
    if lengths is not None and (
        lengths.shape != (query.shape[dims[0]],) or not jnp.issubdtype(lengths.dtype, jnp.integer)
    ):
        got = f"{lengths.dtype} of shape {lengths.shape}"
        want = f"integers of shape ({query.shape[dims[0]]},)"
        fix = "Pass the length of each sequence."
        raise ValueError(wrong("attention", "lengths", got, want, fix))
    if mask is not None:
        (batch, length), keys = (query.shape[d] for d in dims), key.shape[dims[1]]
        _check_mask(mask, (batch, query.shape[2], length, keys))
    return masking


def _check_mask(mask: Any, whole: tuple[int, ...]) -> None:
    if mask.dtype != jnp.bool_:
        fix = "True where a query sees a key: pass `mask != 0`."
        raise TypeError(wrong("attention", "mask", f"of dtype {mask.dtype}", "bool", fix))
    if mask.ndim != 4 or any(m not in (1, n) for m, n in zip(mask.shape, whole, strict=True)):
        fix = "Each dim of [batch, heads, q, k] is 1 or whole."
        raise ValueError(
            wrong("attention", "mask", f"of shape {mask.shape}", f"dims of {whole} or 1", fix)
        )
