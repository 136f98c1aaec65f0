"""Dense, norms and softmax."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import shardops as so
from shardops.layers import arguments, calls, modules
from shardops.layers.activations import check_activation
from shardops.layers.linen.parameters import (
    KERNEL_INIT,
    ZEROS,
    norm_of,
    quantizers,
    sharding,
    weights_of,
)


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
        x = arguments.array("Dense", "x", x)
        axis = arguments.dims("Dense", "axis", self.axis)
        outputs = arguments.counts("Dense", "features", self.features)
        check_activation("Dense", self.activation)
        weights = weights_of(self, modules.inputs_of(x, axis), outputs)
        return calls.dense(
            x,
            weights,
            axis,
            dtype=self.dtype,
            activation=self.activation,
            quantizers=quantizers(self),
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
        x = arguments.array("LayerNorm", "x", x)
        return calls.norm(x, norm_of(self, "layer_norm", x.shape[-1]), self.dtype)


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
        x = arguments.array("RMSNorm", "x", x)
        return calls.norm(x, norm_of(self, "rms_norm", x.shape[-1]), self.dtype)


class Softmax(nn.Module):
    """`so.softmax` over the last dim. Attributes as there; no parameters.

    As there, True in `mask` hides a key: the opposite of Flax's and `MultiHeadAttention`'s masks.
    """

    scale: float = 1.0
    causal: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return so.softmax(x, scale=self.scale, causal=self.causal, mask=mask)
