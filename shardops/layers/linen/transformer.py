"""Attention and transformer layers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardops.layers import arguments, calls, modules
from shardops.layers.attention import Implementation, MaskKind
from shardops.layers.linen.joined import MLPParameters
from shardops.layers.linen.parameters import (
    KERNEL_INIT,
    Kernel,
    Scale,
    current,
    layout,
    op_of,
    quantizers,
)
from shardops.layers.projections import NormKind
from shardops.layers.transformer import NORMS, AttentionWeights, Heads, Tokens
from shardops.primitives import check


def attention_parameters(
    module: Any, heads: Heads, features: int, kv_features: int | None, out_features: int
) -> tuple[AttentionWeights, Any]:
    """(weights, quantisers) of a module with the fields of `MultiHeadAttention`.

    kv_features: of keys and values made of another input; None: of the same.
    """
    op = op_of(module)
    modules.check_split(op, heads, current(module.rules))
    common = {
        "use_bias": module.use_bias,
        "param_dtype": module.param_dtype,
        "kernel_init": module.kernel_init,
        "rules": module.rules,
    }
    queries = (heads.num_heads, heads.head_dim)
    keys = (heads.num_kv_heads, heads.head_dim)

    def into_heads(name: str, inputs: int, shape: tuple[int, ...], names: Any) -> Any:
        return Kernel(op, (inputs,), shape, kernel_axes=names, name=name, **common)()[0]

    of_kv = features if kv_features is None else kv_features
    query = into_heads("query", features, queries, modules.QUERY)
    key = into_heads("key", of_kv, keys, modules.KEY_VALUE)
    value = into_heads("value", of_kv, keys, modules.KEY_VALUE)
    out, of_out = Kernel(
        op,
        queries,
        (out_features,),
        kernel_axes=modules.OUT,
        bias_axes=modules.VECTOR,
        recipe=module.recipe,
        name="out",
        **common,
    )()
    into = quantizers(module, "qkv_quantizers")
    kv_into = None if kv_features is None else quantizers(module, "kv_quantizers")
    return AttentionWeights(query, key, value, out), (into, of_out, kv_into)


class AttentionParameters(nn.Module):
    """The four kernels of attention, for a transformer layer."""

    op: str
    heads: Heads
    features: int
    use_bias: bool = False
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(self) -> tuple[AttentionWeights, Any]:
        return attention_parameters(self, self.heads, self.features, None, self.features)


class MultiHeadAttention(nn.Module):
    """Attention of several heads, between two dense layers: `shardops.layers.attention`.

    Queries, keys and values of one input are one product.

    Attributes:
      num_heads, qkv_features, out_features: as in `nn.MultiHeadDotProductAttention`; a head has
        qkv_features / num_heads features, or `head_dim`.
      num_kv_heads: a divisor of num_heads; None: num_heads.
      mask_kind: "none" | "causal" | "padding" | "padding_causal".
      rope_theta: base of rotary positions; None: none.
      implementation: None | "cudnn" | "softmax": see `attention`.
      batch_first: whether x, kv and the result are [batch, length, ...], or [length, batch, ...].
      dtype, param_dtype, kernel_init, use_bias, rules, recipe: as in `Dense`. Logical axes are
        those of `shardops.layers.axes`.
    Parameters: query, key, value, out, each with kernel and bias, as in
    `nn.MultiHeadDotProductAttention`.
    Raises: ValueError where heads do not divide, or a kind is not known.
    """

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mask_kind: MaskKind = "none"
    rope_theta: float | None = None
    implementation: Implementation = None
    use_bias: bool = True
    batch_first: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        lengths: jax.Array | None = None,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attend from x [batch, length, d] to itself, or to kv [batch, keys, ...].

        Args:
          lengths: [batch], with the mask kinds of padding: how many keys of each sequence count.
          mask: bool, True where a query sees a key, broadcasting to [batch, heads, q, k].
          positions: [batch, length] or [length], of rotary positions; None: counted from 0.
        These three are as they are here with either `batch_first`.
        """
        op = "MultiHeadAttention"
        x = arguments.array(op, "x", x)
        kv = None if kv is None else arguments.array(op, "kv", kv)
        check.flag(op, "batch_first", self.batch_first)
        arguments.dtypes(op, self.dtype, self.param_dtype)
        features = x.shape[-1]
        heads = Heads.of(
            features if self.qkv_features is None else self.qkv_features,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            op=op,
            mask_kind=self.mask_kind,
            rope_theta=self.rope_theta,
            implementation=self.implementation,
        )
        of_kv = None if kv is None else kv.shape[-1]
        out = features if self.out_features is None else self.out_features
        weights, by_recipe = attention_parameters(self, heads, features, of_kv, out)
        return calls.attend(
            x,
            kv,
            weights,
            heads,
            dtype=self.dtype,
            tokens=Tokens(lengths, mask, positions),
            quantizers=by_recipe,
            layout=layout(self.rules, self.batch_first),
        )


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer: x + attention(norm(x)), and the same with an MLP.

    Attributes:
      num_heads, num_kv_heads, head_dim: of attention; head_dim None: features / num_heads.
      hidden_features: of the MLP.
      kind: "decoder": a query sees the keys before it; "encoder": all.
      padded: calls take `lengths`: keys beyond them are hidden.
      norm: "rms_norm" | "layer_norm".
      activation: of the MLP, as in `so.layer_norm_mlp`.
      use_bias: of the dense layers, and of LayerNorms.
      keep_gathered: the inputs of products that are gathered along the sequence are values of their
        own, for both passes; inside `jax.checkpoint` the policy `save_gathered` keeps them. On
        meshes of Explicit axes alone.
      The others: as in `MultiHeadAttention`.
    Parameters: attention_norm.scale, attention.query.kernel, .key, .value, .out, mlp.norm.scale,
    mlp.up.kernel, mlp.down.kernel, and biases.
    Raises: ValueError where heads do not divide, or a kind, norm or activation is not known.
    Sharding: see `shardops.layers.presets`.
    """

    num_heads: int
    hidden_features: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    kind: str = "decoder"
    padded: bool = False
    norm: NormKind = "rms_norm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    activation: Any = "gelu"
    rope_theta: float | None = None
    implementation: Implementation = None
    use_bias: bool = False
    keep_gathered: bool = False
    batch_first: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """One layer of x [batch, length, features], or [length, batch, features] where it is not
        batch-first. Arguments as in `MultiHeadAttention`."""
        op = "TransformerLayer"
        x = arguments.array(op, "x", x)
        features = x.shape[-1]
        check.one_of(op, "norm", self.norm, NORMS)
        check.flag(op, "batch_first", self.batch_first)
        arguments.dtypes(op, self.dtype, self.param_dtype)
        heads = modules.heads_of(
            self.kind,
            self.padded,
            features,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_theta=self.rope_theta,
            implementation=self.implementation,
        )
        common = {
            "use_bias": self.use_bias,
            "param_dtype": self.param_dtype,
            "rules": self.rules,
        }
        norms = {"epsilon": self.epsilon, "zero_centered_gamma": self.zero_centered_gamma}
        norm = Scale(op, self.norm, features, name="attention_norm", **norms, **common)()
        common |= {"kernel_init": self.kernel_init, "recipe": self.recipe}
        of_attention, attention_by = AttentionParameters(
            op, heads, features, name="attention", **common
        )()
        mlp_norm, of_mlp, mlp_by = MLPParameters(
            op,
            features,
            self.hidden_features,
            activation=self.activation,
            norm=self.norm,
            name="mlp",
            **norms,
            **common,
        )()
        lies = layout(self.rules, self.batch_first)
        return calls.layer(
            x,
            (norm, mlp_norm),
            (of_attention, of_mlp),
            heads,
            dtype=self.dtype,
            activation=self.activation,
            tokens=Tokens(lengths, mask, positions),
            quantizers=(attention_by, mlp_by),
            layout=modules.gathering(op, x, lies) if self.keep_gathered else lies,
        )
