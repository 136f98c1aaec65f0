"""A pre-norm transformer layer, and the attention block in it, as functions of their parameters.

h = x + attention(norm(x)),  y = h + mlp(norm(h))
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

import shardops as so
from shardops.errors import shown, wrong
from shardops.layers import arguments
from shardops.layers.attention import MASK_KINDS, Implementation, MaskKind, attention, rotary
from shardops.layers.axes import Layout
from shardops.layers.projections import Norm, Weights, joined, projected
from shardops.primitives import check

NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class Heads:
    """The static part of attention.

    Attributes:
      num_heads: of queries.
      num_kv_heads: of keys and values: a divisor of num_heads.
      head_dim: features of a head.
      mask_kind: as in `attention`.
      rope_theta: base of rotary positions; None: none.
      implementation: as in `attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask_kind: MaskKind = "none"
    rope_theta: float | None = None
    implementation: Implementation = None

    @classmethod
    def of(
        cls,
        features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        op: str = "Heads",
        **rest: Any,
    ) -> "Heads":
        """Checked; a head has its share of the features where `head_dim` is None. `op` in errors.

        Raises: ValueError where features or heads do not divide, or a kind is not known.
        """
        arguments.count(op, "num_heads", num_heads)
        kv = num_heads
        if num_kv_heads is not None:
            kv = arguments.count(op, "num_kv_heads", num_kv_heads)
        if head_dim is not None:
            arguments.count(op, "head_dim", head_dim)
        if num_heads % kv:
            want = f"a divisor of num_heads, {num_heads}"
            fix = "Each head of keys serves a whole group of queries."
            raise ValueError(wrong(op, "num_kv_heads", shown(kv), want, fix))
        if head_dim is None and features % num_heads:
            want = f"a divisor of the {features} features"
            fix = "Or pass head_dim: heads may have any number of features."
            raise ValueError(wrong(op, "num_heads", shown(num_heads), want, fix))
        head_dim = features // num_heads if head_dim is None else head_dim
        theta = rest.get("rope_theta")
        if theta is not None:
            fix = "It is the base of the wave lengths: 1e4 is usual."
            arguments.positive(op, "rope_theta", theta, fix)
        if theta is not None and head_dim % 2:
            fix = "Rotary positions turn pairs of features."
            raise ValueError(wrong(op, "head_dim", shown(head_dim), "an even number", fix))
        check.one_of(op, "mask_kind", rest.get("mask_kind", "none"), MASK_KINDS)
        allowed = (None, "cudnn", "softmax")
        check.one_of(op, "implementation", rest.get("implementation"), allowed)
        return cls(num_heads, kv, head_dim, **rest)


class AttentionWeights(NamedTuple):
    """query [d, heads, head_dim]; key, value [d, kv_heads, head_dim]; out [heads, head_dim, d]."""

    query: Weights
    key: Weights
    value: Weights
    out: Weights


class MLPWeights(NamedTuple):
    """up [d, f], or [d, 2, f] of a gated activation; down [f, d]."""

    up: Weights
    down: Weights


class Tokens(NamedTuple):
    """What is known of the tokens of a batch: see `attention` and `rotary`."""

    lengths: jax.Array | None = None
    mask: jax.Array | None = None
    positions: jax.Array | None = None


NOTHING = Tokens()
FREE = Layout()


def self_attention(
    x: jax.Array,
    weights: AttentionWeights,
    heads: Heads,
    *,
    kv: jax.Array | None = None,
    norm: Norm | None = None,
    tokens: Tokens = NOTHING,
    layout: Layout = FREE,
    quantizers: Any = (None, None, None),
) -> tuple[jax.Array, jax.Array]:
    """Project, attend, project back.

    Args:
      x: [batch, length, d], or [length, batch, d] where `layout.batch_first` is False.
      kv: [batch, keys, d] that keys and values are made of, without the norm; None: x.
      norm: applied to x before the projections.
      quantizers: of the product into heads, of that out of them, and, with `kv`, of that of keys
        and values.
    Returns: [batch, length, d of out], and x for a sum with it: see `projected`.
    Raises: ValueError for shapes, and for positions without `rope_theta`; TypeError for what is no
      array.
    Sharding: heads cut over an axis: the input gathered along it once for queries, keys and values
      where the stream is cut over it, and one sum, or scatter, after the last product. Attention
      itself moves nothing.
    """
    _check_inputs(x, kv, weights, heads, tokens, layout.batch_first)
    options = {"heads": layout.heads, "batch": layout.batch}
    into = {"norm": norm, "quantizers": quantizers[0], **options}
    if kv is None:
        parts = (weights.query, weights.key, weights.value)
        (q, k, v), x = projected(x, parts, gathered=layout.gathered, **into)
    else:
        (q,), x = projected(x, (weights.query,), **into)
        of_kv = (weights.key, weights.value)
        (k, v), _ = projected(kv, of_kv, quantizers=quantizers[2], **options)
    if heads.rope_theta is not None:
        own = {"batch_first": layout.batch_first}
        q = rotary(q, heads.rope_theta, tokens.positions, **own)
        k = rotary(k, heads.rope_theta, None if kv is not None else tokens.positions, **own)
    mixed = attention(
        q,
        k,
        v,
        mask_kind=heads.mask_kind,
        lengths=tokens.lengths,
        mask=tokens.mask,
        implementation=heads.implementation,
        batch_first=layout.batch_first,
    )
    out = joined(mixed, weights.out, quantizers=quantizers[1], stream=layout.stream, **options)
    return out, x


def _check_inputs(
    x: jax.Array,
    kv: jax.Array | None,
    weights: AttentionWeights,
    heads: Heads,
    tokens: Tokens,
    batch_first: bool,
) -> None:
    op = "self_attention"
    rows = "batch, length" if batch_first else "length, batch"
    for name, array, of in (("x", x, weights.query), ("kv", x if kv is None else kv, weights.key)):
        want = f"[{rows}, {of.kernel.shape[0]}]"
        if array.ndim != 3 or array.shape[-1] != of.kernel.shape[0]:
            fix = "These are the features of the query and key kernels."
            raise ValueError(wrong(op, name, f"of shape {array.shape}", want, fix))
    batch = 0 if batch_first else 1
    if kv is not None and kv.shape[batch] != x.shape[batch]:
        want = f"[{rows}, features] with the batch of x, {x.shape[batch]}"
        fix = "Transpose it, or pass batch_first as its dims lie."
        raise ValueError(wrong(op, "kv", f"of shape {kv.shape}", want, fix))
    for name, value in tokens._asdict().items():
        if value is not None and not isinstance(value, jax.Array | np.ndarray):
            got, fix = f"a {type(value).__name__}", "Convert it with jnp.asarray."
            raise TypeError(wrong(op, name, got, "an array", fix))
    if tokens.positions is not None and heads.rope_theta is None:
        fix = "Give the layer a rope_theta, or leave positions out."
        got = "given, where there is no rope_theta"
        raise ValueError(wrong(op, "positions", got, "None", fix))


def mlp(
    x: jax.Array,
    weights: MLPWeights,
    norm: Norm,
    activation: Any,
    *,
    add: jax.Array | None = None,
    return_input: bool = False,
    layout: Layout = FREE,
    quantizers: Any = None,
) -> Any:
    """`so.layer_norm_mlp` of these parameters."""
    return so.layer_norm_mlp(
        x,
        norm.gamma,
        (weights.up.kernel, weights.down.kernel),
        beta=norm.beta,
        biases=(weights.up.bias, weights.down.bias),
        norm=norm.norm,
        epsilon=norm.epsilon,
        zero_centered_gamma=norm.zero_centered_gamma,
        activation=activation,
        batch_dims=((layout.batch,), ()),
        quantizers=quantizers,
        add=add,
        return_input=return_input,
        hidden_sharding=layout.hidden,
        out_sharding=layout.stream,
        input_sharding=layout.gathered,
    )


def transformer_layer(
    x: jax.Array,
    attention_norm: Norm,
    attention_weights: AttentionWeights,
    mlp_norm: Norm,
    mlp_weights: MLPWeights,
    *,
    heads: Heads,
    activation: Any,
    tokens: Tokens = NOTHING,
    layout: Layout = FREE,
    quantizers: Any = ((None, None, None), None),
) -> jax.Array:
    """One layer of a decoder (a causal `heads.mask_kind`) or of an encoder.

    Args:
      x: [batch, length, d], the residual stream, or [length, batch, d]: see `layout`.
      activation: of the MLP, as in `so.layer_norm_mlp`.
      layout: where activations lie: of rules by `Layout.of`, or `presets.layout`.
      quantizers: of attention and of the MLP.
    Returns: [batch, length, d].
    Sharding: with a stream cut over the axis of heads and hidden features, 2 all-gathers and 2
      reduce-scatters; backward the same, and one more all-gather for the weight gradient of each
      product into heads or hidden features, unless its gathered input is kept (`Layout.gathered`).
      Where tokens are many beside features, products move fewer bytes by gathering a kernel.
    """
    mixed, x = self_attention(
        x,
        attention_weights,
        heads,
        norm=attention_norm,
        tokens=tokens,
        layout=layout,
        quantizers=quantizers[0],
    )
    # The kernel of the second norm makes the sum, and writes it for the last one.
    out, x = mlp(
        x,
        mlp_weights,
        mlp_norm,
        activation,
        add=mixed,
        return_input=True,
        layout=layout,
        quantizers=quantizers[1],
    )
    return x + out
