"""A norm and a dense layer, a norm and an MLP."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardops.layers import arguments, calls, modules
from shardops.layers.activations import check_activation, check_gated
from shardops.layers.linen.parameters import (
    KERNEL_INIT,
    ZEROS,
    Kernel,
    Scale,
    layout,
    op_of,
    sharding,
)
from shardops.layers.projections import NormKind
from shardops.layers.transformer import NORMS, MLPWeights
from shardops.primitives import check


class LayerNormDense(nn.Module):
    """A norm and a dense layer of its result: `so.layer_norm_dense`.

    Attributes:
      features: int or a tuple: the last dims of the result.
      norm: "layer_norm" | "rms_norm".
      norm_bias: whether a LayerNorm has a bias; None: as `use_bias`.
      The others: as in `Dense` and `LayerNorm`.
    Parameters: norm.scale, norm.bias, dense.kernel, dense.bias: a LayerNorm and a Dense of Flax
    under these names.
    """

    features: int | Sequence[int]
    norm: NormKind = "layer_norm"
    norm_bias: bool | None = None
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    activation: Any = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    bias_init: Any = ZEROS
    kernel_axes: Any = None
    bias_axes: Any = None
    out_axes: Any = None
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        op = "LayerNormDense"
        x = arguments.array(op, "x", x)
        check.one_of(op, "norm", self.norm, NORMS)
        check_activation(op, self.activation)
        arguments.dtypes(op, self.dtype, self.param_dtype)
        norm = Scale(
            op,
            self.norm,
            x.shape[-1],
            use_bias=self.use_bias if self.norm_bias is None else self.norm_bias,
            epsilon=self.epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            param_dtype=self.param_dtype,
            rules=self.rules,
            name="norm",
        )()
        weights, by_recipe = Kernel(
            op,
            x.shape[-1:],
            arguments.counts(op, "features", self.features),
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            kernel_axes=self.kernel_axes,
            bias_axes=self.bias_axes,
            rules=self.rules,
            recipe=self.recipe,
            name="dense",
        )()
        return calls.norm_dense(
            x,
            norm,
            weights,
            dtype=self.dtype,
            activation=self.activation,
            quantizers=by_recipe,
            out_sharding=sharding(self.out_axes, self.rules),
        )


class MLPParameters(nn.Module):
    """A norm and the two kernels of an MLP: what `LayerNormMLP` and a transformer layer hold."""

    op: str
    features: int
    hidden_features: int
    activation: Any = "gelu"
    norm: NormKind = "layer_norm"
    norm_bias: bool | None = None
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(self) -> Any:
        return mlp_parameters(self, self.features)


def mlp_parameters(module: Any, features: int) -> Any:
    """(norm, weights, quantisers) of a module with the fields of `LayerNormMLP`."""
    op = op_of(module)
    check_gated(op, module.activation)
    check.one_of(op, "norm", module.norm, NORMS)
    arguments.count(op, "hidden_features", module.hidden_features)
    kernels = {
        "use_bias": module.use_bias,
        "param_dtype": module.param_dtype,
        "kernel_init": module.kernel_init,
        "rules": module.rules,
        "recipe": module.recipe,
    }
    norm = Scale(
        op,
        module.norm,
        features,
        use_bias=module.use_bias if module.norm_bias is None else module.norm_bias,
        epsilon=module.epsilon,
        zero_centered_gamma=module.zero_centered_gamma,
        param_dtype=module.param_dtype,
        rules=module.rules,
        name="norm",
    )()
    hidden = modules.hidden_shape(module.hidden_features, module.activation)
    up_axes = modules.up_axes(module.activation)
    up, of_up = Kernel(op, (features,), hidden, kernel_axes=up_axes, name="up", **kernels)()
    down, of_down = Kernel(
        op,
        (module.hidden_features,),
        (features,),
        kernel_axes=modules.DOWN,
        bias_axes=modules.VECTOR,
        name="down",
        **kernels,
    )()
    return norm, MLPWeights(up, down), modules.pair_of(of_up, of_down)


class LayerNormMLP(nn.Module):
    """A norm, a dense layer with its activation, and a dense layer back: `so.layer_norm_mlp`.

    Attributes:
      hidden_features: between the two products.
      activation: one, or a pair for a gate, as in `so.layer_norm_mlp`.
      batch_first: whether x is [batch, length, features], or [length, batch, features].
      The others: as in `LayerNormDense`. Logical axes are those of `shardops.layers.axes`.
    Parameters: norm.scale, norm.bias, up.kernel [d, f] or, for a gate, [d, 2, f], up.bias,
    down.kernel, down.bias.
    """

    hidden_features: int
    activation: Any = "gelu"
    norm: NormKind = "layer_norm"
    norm_bias: bool | None = None
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    batch_first: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = arguments.array("LayerNormMLP", "x", x)
        check.flag("LayerNormMLP", "batch_first", self.batch_first)
        arguments.dtypes("LayerNormMLP", self.dtype, self.param_dtype)
        norm, weights, by_recipe = mlp_parameters(self, x.shape[-1])
        return calls.norm_mlp(
            x,
            norm,
            weights,
            dtype=self.dtype,
            activation=self.activation,
            quantizers=by_recipe,
            layout=layout(self.rules, self.batch_first),
        )
