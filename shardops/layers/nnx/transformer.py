"""Attention and transformer layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardops.errors import wrong
from shardops.layers import arguments, calls, modules
from shardops.layers.attention import Implementation, MaskKind
from shardops.layers.axes import Rules
from shardops.layers.nnx.basic import KERNEL_INIT, Dense, norm_of
from shardops.layers.nnx.joined import LayerNormMLP
from shardops.layers.nnx.parameters import Ruled, quantizers, state_of
from shardops.layers.projections import NormKind
from shardops.layers.transformer import AttentionWeights, Heads, Tokens
from shardops.primitives import check


class MultiHeadAttention(Ruled):
    """Attention of several heads, between two dense layers: `shardops.layers.attention`.

    Queries, keys and values of one input are one product.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads: as in
        `nnx.MultiHeadAttention`; a head has qkv_features / num_heads features.
      in_kv_features: features of `kv`; None: in_features. With a recipe that has state, given
        where calls have `kv`.
      mask_kind: "none" | "causal" | "padding" | "padding_causal".
      rope_theta: base of rotary positions; None: none.
      implementation: None | "cudnn" | "softmax": see `attention`.
      batch_first: whether x, kv and the result are [batch, length, ...], or [length, batch, ...].
      dtype, param_dtype, kernel_init, use_bias, rules, recipe: as in `Dense`. Logical axes are
        those of `shardops.layers.axes`.
    Parameters: query, key, value, out, each with kernel and bias, as in `nnx.MultiHeadAttention`.
    Raises: ValueError where heads do not divide, or a kind is not known.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        head_dim: int | None = None,
        mask_kind: MaskKind = "none",
        rope_theta: float | None = None,
        implementation: Implementation = None,
        use_bias: bool = True,
        batch_first: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = KERNEL_INIT,
        rules: Rules | None = None,
        recipe: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(rules)
        op = "MultiHeadAttention"
        arguments.count(op, "in_features", in_features)
        arguments.dtypes(op, dtype, param_dtype)
        heads = Heads.of(
            in_features if qkv_features is None else qkv_features,
            num_heads,
            num_kv_heads,
            head_dim,
            op=op,
            mask_kind=mask_kind,
            rope_theta=rope_theta,
            implementation=implementation,
        )
        modules.check_split(op, heads, self.rules)
        self.heads, self.dtype, self.recipe = heads, dtype, recipe
        self.batch_first = check.flag(op, "batch_first", batch_first)
        common = {
            "use_bias": use_bias,
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "rules": rules,
            "rngs": rngs,
        }
        of_kv = in_features if in_kv_features is None else in_kv_features
        queries = (heads.num_heads, heads.head_dim)
        keys = (heads.num_kv_heads, heads.head_dim)
        out = in_features if out_features is None else out_features
        self.query = Dense(in_features, queries, kernel_axes=modules.QUERY, **common)
        self.key = Dense(of_kv, keys, kernel_axes=modules.KEY_VALUE, **common)
        self.value = Dense(of_kv, keys, kernel_axes=modules.KEY_VALUE, **common)
        self.out = Dense(
            queries,
            out,
            axis=(-2, -1),
            kernel_axes=modules.OUT,
            bias_axes=modules.VECTOR,
            recipe=recipe,
            **common,
        )
        self.qkv_quantizers = state_of(op, recipe)
        self.kv_quantizers = state_of(op, None if in_kv_features is None else recipe)

    def weights(self) -> AttentionWeights:
        """Its kernels and biases as they are kept."""
        layers = (self.query, self.key, self.value, self.out)
        weights = AttentionWeights(*(layer.weights() for layer in layers))
        heads = weights.query.kernel.shape[1]
        modules.check_whole("MultiHeadAttention", "heads", heads, self.heads.num_heads)
        return weights

    def by_recipe(self, cross: bool = False) -> Any:
        """The quantisers of the products: into heads, out of them, and of kv where it is given.

        Raises: ValueError where one of them has no state.
        """
        op = "MultiHeadAttention"
        if cross and self.qkv_quantizers is not None and self.kv_quantizers is None:
            want, fix = "a DenseQuantizers", "Make the module with in_kv_features, those of kv."
            raise ValueError(wrong(op, "delayed state of kv", "missing", want, fix))
        into = quantizers(op, self.recipe, self.qkv_quantizers)
        of_kv = quantizers(op, self.recipe, self.kv_quantizers) if cross else None
        return into, self.out.by_recipe(), of_kv

    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        lengths: jax.Array | None = None,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attend from x [batch, length, in_features] to itself, or to kv [batch, keys, ...].

        Args:
          lengths: [batch], with the mask kinds of padding: how many keys of each sequence count.
          mask: bool, True where a query sees a key, broadcasting to [batch, heads, q, k].
          positions: [batch, length] or [length], of rotary positions; None: counted from 0.
        These three are as they are here with either `batch_first`.
        """
        op = "MultiHeadAttention"
        return calls.attend(
            arguments.array(op, "x", x),
            None if kv is None else arguments.array(op, "kv", kv),
            self.weights(),
            self.heads,
            dtype=self.dtype,
            tokens=Tokens(lengths, mask, positions),
            quantizers=self.by_recipe(kv is not None),
            layout=self.layout(self.batch_first),
        )


class TransformerLayer(Ruled):
    """A pre-norm transformer layer: x + attention(norm(x)), and the same with an MLP.

    Args:
      features: of the residual stream.
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

    def __init__(
        self,
        features: int,
        num_heads: int,
        hidden_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kind: str = "decoder",
        padded: bool = False,
        norm: NormKind = "rms_norm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        activation: Any = "gelu",
        rope_theta: float | None = None,
        implementation: Implementation = None,
        use_bias: bool = False,
        keep_gathered: bool = False,
        batch_first: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = KERNEL_INIT,
        rules: Rules | None = None,
        recipe: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(rules)
        check.flag("TransformerLayer", "batch_first", batch_first)
        arguments.count("TransformerLayer", "features", features)
        arguments.count("TransformerLayer", "hidden_features", hidden_features)
        arguments.dtypes("TransformerLayer", dtype, param_dtype)
        heads = modules.heads_of(
            kind,
            padded,
            features,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            implementation=implementation,
        )
        self.dtype, self.keep_gathered = dtype, keep_gathered
        common = {"use_bias": use_bias, "param_dtype": param_dtype, "rules": rules, "rngs": rngs}
        norms = {"epsilon": epsilon, "zero_centered_gamma": zero_centered_gamma}
        self.attention_norm = norm_of(norm, features, "TransformerLayer", **norms, **common)
        common |= {"kernel_init": kernel_init, "recipe": recipe, "batch_first": batch_first}
        self.attention = MultiHeadAttention(
            num_heads,
            features,
            num_kv_heads=num_kv_heads,
            head_dim=heads.head_dim,
            mask_kind=heads.mask_kind,
            rope_theta=rope_theta,
            implementation=implementation,
            **common,
        )
        self.mlp = LayerNormMLP(
            features, hidden_features, activation=activation, norm=norm, **norms, **common
        )

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
        x = arguments.array("TransformerLayer", "x", x)
        layout = self.layout(self.mlp.batch_first)
        if self.keep_gathered:
            layout = modules.gathering("TransformerLayer", x, layout)
        return calls.layer(
            x,
            (self.attention_norm.norm(), self.mlp.norm.norm()),
            (self.attention.weights(), self.mlp.weights()),
            self.attention.heads,
            dtype=self.dtype,
            activation=self.mlp.activation,
            tokens=Tokens(lengths, mask, positions),
            quantizers=(self.attention.by_recipe(), self.mlp.by_recipe()),
            layout=layout,
        )
