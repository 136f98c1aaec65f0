"""Dense, norms and softmax, alone and joined."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import shardops as so
from shardops.layers import modules
from shardops.layers.activations import check_gated
from shardops.layers.linen.parameters import (
    KERNEL_INIT,
    ZEROS,
    Kernel,
    Scale,
    layout,
    norm_of,
    sharding,
    weights_of,
)
from shardops.layers.transformer import NORMS, MLPWeights
from shardops.primitives import check


class Dense(nn.Module):
    """activation(x · kernel + bias) over any dims of x: `so.dense`.

    Attributes:
      features: int or a tuple: the last dims of the result.
      axis: the contracted dims of x.
      activation: as in `so.dense`.
      dtype: of operands and result; None: the common one of x and the parameters.
      kernel_axes: logical names of the dims of the kernel, [*in, *features].
      bias_axes: of the bias; None: those of the kernel's features.
      out_axes: of the result.
      rules: from logical names to axes of the mesh; None: those of Flax's context.
      recipe: of `so.recipes`; None: the operands as they are.
    Parameters: kernel, bias, as in `nn.Dense` and `nn.DenseGeneral`.
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
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
        axis = modules.tuple_of(self.axis)
        weights = weights_of(self, modules.inputs_of(x, axis), modules.tuple_of(self.features))
        return modules.dense(
            x,
            weights,
            axis,
            dtype=self.dtype,
            activation=self.activation,
            quantizers=None,
            out_sharding=sharding(self.out_axes, self.rules),
        )


class LayerNorm(nn.Module):
    """`so.layer_norm` over the last dim.

    Attributes:
      zero_centered_gamma: scale by 1 + scale.
      dtype: of the result; None: the common one of x and the parameters.
      scale_axes: logical names of the dim of scale and bias.
      rules: as in `Dense`.
    Parameters: scale, bias, as in `nn.LayerNorm`.
    """

    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    scale_init: Any = None
    bias_init: Any = ZEROS
    scale_axes: Any = modules.VECTOR
    rules: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return modules.norm(x, norm_of(self, "layer_norm", x.shape[-1]), self.dtype)


class RMSNorm(nn.Module):
    """`so.rms_norm` over the last dim. Attributes as in `LayerNorm`, no bias.

    Parameters: scale, as in `nn.RMSNorm`.
    """

    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    scale_init: Any = None
    scale_axes: Any = modules.VECTOR
    rules: Any = None
    use_bias = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return modules.norm(x, norm_of(self, "rms_norm", x.shape[-1]), self.dtype)


class Softmax(nn.Module):
    """`so.softmax` over the last dim. Attributes as there; no parameters.

    As there, True in `mask` hides a key: the opposite of Flax's and `MultiHeadAttention`'s masks.
    """

    scale: float = 1.0
    causal: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return so.softmax(x, scale=self.scale, causal=self.causal, mask=mask)


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
    norm: str = "layer_norm"
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
        check.one_of("LayerNormDense", "norm", self.norm, NORMS)
        norm = Scale(
            self.norm,
            x.shape[-1],
            use_bias=self.use_bias if self.norm_bias is None else self.norm_bias,
            epsilon=self.epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            param_dtype=self.param_dtype,
            rules=self.rules,
            name="norm",
        )()
        weights = Kernel(
            x.shape[-1:],
            modules.tuple_of(self.features),
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            kernel_axes=self.kernel_axes,
            bias_axes=self.bias_axes,
            rules=self.rules,
            name="dense",
        )()
        return modules.norm_dense(
            x,
            norm,
            weights,
            dtype=self.dtype,
            activation=self.activation,
            quantizers=None,
            out_sharding=sharding(self.out_axes, self.rules),
        )


class MLPParameters(nn.Module):
    """A norm and the two kernels of an MLP: what `LayerNormMLP` and a transformer layer hold."""

    features: int
    hidden_features: int
    activation: Any = "gelu"
    norm: str = "layer_norm"
    norm_bias: bool | None = None
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    rules: Any = None

    @nn.compact
    def __call__(self) -> Any:
        return mlp_parameters(self, self.features)


def mlp_parameters(module: Any, features: int) -> Any:
    """(norm, weights) of a module with the fields of `LayerNormMLP`."""
    check_gated(type(module).__name__, module.activation)
    check.one_of(type(module).__name__, "norm", module.norm, NORMS)
    kernels = {
        "use_bias": module.use_bias,
        "param_dtype": module.param_dtype,
        "kernel_init": module.kernel_init,
        "rules": module.rules,
    }
    norm = Scale(
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
    up = Kernel((features,), hidden, kernel_axes=up_axes, name="up", **kernels)()
    down = Kernel(
        (module.hidden_features,),
        (features,),
        kernel_axes=modules.DOWN,
        bias_axes=modules.VECTOR,
        name="down",
        **kernels,
    )()
    return norm, MLPWeights(up, down)


class LayerNormMLP(nn.Module):
    """A norm, a dense layer with its activation, and a dense layer back: `so.layer_norm_mlp`.

    Attributes:
      hidden_features: between the two products.
      activation: one, or a pair for a gate, as in `so.layer_norm_mlp`.
      The others: as in `LayerNormDense`. Logical axes are those of `shardops.layers.axes`.
    Parameters: norm.scale, norm.bias, up.kernel [d, f] or, for a gate, [d, 2, f], up.bias,
    down.kernel, down.bias.
    """

    hidden_features: int
    activation: Any = "gelu"
    norm: str = "layer_norm"
    norm_bias: bool | None = None
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm, weights = mlp_parameters(self, x.shape[-1])
        return modules.norm_mlp(
            x,
            norm,
            weights,
            dtype=self.dtype,
            activation=self.activation,
            quantizers=None,
            layout=layout(self.rules),
        )
