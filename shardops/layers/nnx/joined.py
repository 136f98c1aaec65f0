"""A norm and a dense layer, a norm and an MLP."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardops.layers import arguments, calls, modules
from shardops.layers.activations import check_gated
from shardops.layers.axes import Rules
from shardops.layers.nnx.basic import KERNEL_INIT, Dense, norm_of
from shardops.layers.nnx.parameters import Ruled
from shardops.layers.projections import NormKind
from shardops.layers.transformer import MLPWeights
from shardops.primitives import check


class LayerNormDense(Ruled):
    """A norm and a dense layer of its result: `so.layer_norm_dense`.

    Args:
      in_features: length of the last dim of x.
      features: int or a tuple: the last dims of the result.
      norm: "layer_norm" | "rms_norm".
      norm_bias: whether a LayerNorm has a bias; None: as `use_bias`.
      The others: as in `Dense` and `LayerNorm`.
    Parameters: norm.scale, norm.bias, dense.kernel, dense.bias: a LayerNorm and a Linear of Flax
    under these names.
    """

    def __init__(
        self,
        in_features: int,
        features: int | Sequence[int],
        *,
        norm: NormKind = "layer_norm",
        norm_bias: bool | None = None,
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        use_bias: bool = True,
        param_dtype: Any = jnp.float32,
        rules: Rules | None = None,
        rngs: nnx.Rngs,
        **dense: Any,
    ) -> None:
        super().__init__(rules)
        arguments.count("LayerNormDense", "in_features", in_features)
        self.norm = norm_of(
            norm,
            in_features,
            "LayerNormDense",
            use_bias=use_bias if norm_bias is None else norm_bias,
            epsilon=epsilon,
            zero_centered_gamma=zero_centered_gamma,
            param_dtype=param_dtype,
            rules=rules,
            rngs=rngs,
        )
        self.dense = Dense(
            in_features,
            features,
            use_bias=use_bias,
            param_dtype=param_dtype,
            rules=rules,
            rngs=rngs,
            **dense,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return calls.norm_dense(
            arguments.array("LayerNormDense", "x", x),
            self.norm.norm(),
            self.dense.weights(),
            dtype=self.dense.dtype,
            activation=self.dense.activation,
            quantizers=self.dense.by_recipe(),
            out_sharding=self.sharding(self.dense.out_axes),
        )


class LayerNormMLP(Ruled):
    """A norm, a dense layer with its activation, and a dense layer back: `so.layer_norm_mlp`.

    Args:
      features: of x and of the result.
      hidden_features: between the two.
      activation: one, or a pair for a gate, as in `so.layer_norm_mlp`.
      batch_first: whether x is [batch, length, features], or [length, batch, features].
      The others: as in `LayerNormDense`. Logical axes are those of `shardops.layers.axes`.
    Parameters: norm.scale, norm.bias, up.kernel [d, f] or, for a gate, [d, 2, f], up.bias,
    down.kernel, down.bias.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        activation: Any = "gelu",
        norm: NormKind = "layer_norm",
        norm_bias: bool | None = None,
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = KERNEL_INIT,
        batch_first: bool = True,
        rules: Rules | None = None,
        recipe: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(rules)
        check_gated("LayerNormMLP", activation)
        arguments.count("LayerNormMLP", "features", features)
        arguments.count("LayerNormMLP", "hidden_features", hidden_features)
        arguments.dtypes("LayerNormMLP", dtype, param_dtype)
        self.batch_first = check.flag("LayerNormMLP", "batch_first", batch_first)
        self.activation, self.dtype = activation, dtype
        self.hidden_features = hidden_features
        common = {"param_dtype": param_dtype, "rules": rules, "rngs": rngs}
        self.norm = norm_of(
            norm,
            features,
            "LayerNormMLP",
            use_bias=use_bias if norm_bias is None else norm_bias,
            epsilon=epsilon,
            zero_centered_gamma=zero_centered_gamma,
            **common,
        )
        common |= {"use_bias": use_bias, "kernel_init": kernel_init, "recipe": recipe}
        hidden = modules.hidden_shape(hidden_features, activation)
        up = modules.up_axes(activation)
        self.up = Dense(features, hidden, kernel_axes=up, **common)
        self.down = Dense(
            hidden_features,
            features,
            kernel_axes=modules.DOWN,
            bias_axes=modules.VECTOR,
            **common,
        )

    def weights(self) -> MLPWeights:
        """Its kernels and biases as they are kept."""
        weights = MLPWeights(self.up.weights(), self.down.weights())
        hidden = weights.up.kernel.shape[-1]
        modules.check_whole("LayerNormMLP", "hidden features", hidden, self.hidden_features)
        return weights

    def by_recipe(self) -> Any:
        """The quantisers of both products."""
        return modules.pair_of(self.up.by_recipe(), self.down.by_recipe())

    def __call__(self, x: jax.Array) -> jax.Array:
        return calls.norm_mlp(
            arguments.array("LayerNormMLP", "x", x),
            self.norm.norm(),
            self.weights(),
            dtype=self.dtype,
            activation=self.activation,
            quantizers=self.by_recipe(),
            layout=self.layout(self.batch_first),
        )
