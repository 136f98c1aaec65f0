"""Dense, norms and softmax."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import shardops as so
from shardops.errors import wrong
from shardops.layers import arguments, calls, modules
from shardops.layers.activations import check_activation
from shardops.layers.axes import Rules
from shardops.layers.nnx.parameters import Ruled, param, quantizers, state_of, value
from shardops.layers.projections import Norm, NormKind, Weights
from shardops.layers.transformer import NORMS
from shardops.primitives import check

KERNEL_INIT = nnx.initializers.lecun_normal()
ZEROS = nnx.initializers.zeros_init()
ONES = nnx.initializers.ones_init()


class Dense(Ruled):
    """activation(x · kernel + bias) over any dims of x: `so.dense`.

    Args:
      in_features: int or a tuple, one for each of `axis`.
      features: int or a tuple: the last dims of the result.
      axis: the contracted dims of x.
      activation: as in `so.dense`.
      dtype: of operands and result; None: the common one of x and the parameters.
      kernel_axes: logical names of the dims of the kernel, [*in_features, *features].
      bias_axes: of the bias; None: those of the kernel's features.
      out_axes: of the result.
      rules: from logical names to axes of the mesh; None: those of Flax's context.
      recipe: of `so.recipes`; None: the operands as they are.
    Parameters: kernel, bias, as in `nnx.Linear` and `nnx.LinearGeneral`.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        use_bias: bool = True,
        activation: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = KERNEL_INIT,
        bias_init: Any = ZEROS,
        kernel_axes: Any = None,
        bias_axes: Any = None,
        out_axes: Any = None,
        rules: Rules | None = None,
        recipe: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(rules)
        inputs = arguments.counts("Dense", "in_features", in_features)
        outputs = arguments.counts("Dense", "features", features)
        self.axis = modules.axis_for(inputs, axis)
        check_activation("Dense", activation)
        arguments.dtypes("Dense", dtype, param_dtype)
        self.activation, self.dtype, self.recipe = activation, dtype, recipe
        self.out_axes = None if out_axes is None else tuple(out_axes)
        shape = (*inputs, *outputs)
        of_kernel, of_bias = modules.dense_axes(
            "Dense", shape, len(inputs), kernel_axes, bias_axes, self.rules
        )
        init = modules.with_fan_in(kernel_init, len(inputs))
        self.kernel = param(init, rngs, shape, param_dtype, of_kernel, self.rules)
        bias = (
            param(bias_init, rngs, outputs, param_dtype, of_bias, self.rules) if use_bias else None
        )
        self.bias = nnx.data(bias)

        self.quantizers = state_of("Dense", recipe)

    def weights(self) -> Weights:
        """Kernel and bias as they are kept."""
        return Weights(value(self.kernel), value(self.bias))

    def by_recipe(self) -> Any:
        """The quantisers of its product."""
        return quantizers("Dense", self.recipe, self.quantizers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return calls.dense(
            arguments.array("Dense", "x", x),
            self.weights(),
            self.axis,
            dtype=self.dtype,
            activation=self.activation,
            quantizers=self.by_recipe(),
            out_sharding=self.sharding(self.out_axes),
        )


class _Norm(Ruled):
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        scale_init: Any = None,
        bias_init: Any = ZEROS,
        scale_axes: Any = modules.VECTOR,
        rules: Rules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(rules)
        self.epsilon, self.zero_centered_gamma, self.dtype = epsilon, zero_centered_gamma, dtype
        op = type(self).__name__
        arguments.dtypes(op, dtype, param_dtype)
        names = arguments.names(op, "scale_axes", scale_axes, 1)
        init = scale_init or (ZEROS if zero_centered_gamma else ONES)
        shape = (arguments.count(op, "num_features", num_features),)
        self.scale = param(init, rngs, shape, param_dtype, names, self.rules)
        bias = param(bias_init, rngs, shape, param_dtype, names, self.rules) if use_bias else None
        self.bias = nnx.data(bias)

    kind: ClassVar[NormKind]

    def norm(self) -> Norm:
        """Its parameters and kind, for what is computed with it."""
        beta = value(self.bias)
        return Norm(value(self.scale), beta, self.kind, self.epsilon, self.zero_centered_gamma)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = arguments.array(type(self).__name__, "x", x)
        return calls.norm(x, self.norm(), self.dtype)


class LayerNorm(_Norm):
    """`so.layer_norm` over the last dim.

    Args:
      num_features: length of the last dim of x.
      zero_centered_gamma: scale by 1 + scale.
      dtype: of the result; None: the common one of x and the parameters.
      scale_axes: logical names of the dim of scale and bias.
      rules: as in `Dense`.
    Parameters: scale, bias, as in `nnx.LayerNorm`.
    """

    kind = "layer_norm"

    def __init__(self, num_features: int, *, use_bias: bool = True, **options: Any) -> None:
        super().__init__(num_features, use_bias=use_bias, **options)


class RMSNorm(_Norm):
    """`so.rms_norm` over the last dim. Arguments as in `LayerNorm`, no bias.

    Parameters: scale, as in `nnx.RMSNorm`.
    """

    kind = "rms_norm"

    def __init__(self, num_features: int, **options: Any) -> None:
        if options.get("use_bias"):
            fix = "It has none; take LayerNorm."
            raise ValueError(wrong("RMSNorm", "use_bias", "True", "False", fix))
        super().__init__(num_features, **options)


def norm_of(kind: NormKind, num_features: int, op: str, **options: Any) -> _Norm:
    """A norm by the name of its kind; biases of a LayerNorm alone."""
    check.one_of(op, "norm", kind, NORMS)
    use_bias = options.pop("use_bias")
    if kind == "rms_norm":
        return RMSNorm(num_features, **options)
    return LayerNorm(num_features, use_bias=use_bias, **options)


class Softmax(nnx.Module):
    """`so.softmax` over the last dim. Arguments as there; no parameters.

    As there, True in `mask` hides a key: the opposite of Flax's and `MultiHeadAttention`'s masks.
    """

    def __init__(self, *, scale: float = 1.0, causal: Any = None) -> None:
        self.scale, self.causal = scale, causal

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return so.softmax(x, scale=self.scale, causal=self.causal, mask=mask)
