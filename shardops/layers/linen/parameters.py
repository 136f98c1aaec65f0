"""How the Linen modules keep parameters: boxed with logical axes, as Flax does it."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from shardops.layers import axes, modules
from shardops.layers.axes import Layout
from shardops.layers.projections import Norm, Weights

KERNEL_INIT = nn.initializers.lecun_normal()
ZEROS = nn.initializers.zeros_init()
ONES = nn.initializers.ones_init()


def current(rules: Any) -> Any:
    """The rules of a module, else those of Flax's context."""
    return nn.get_logical_axis_rules() if rules is None else modules.rules_of(rules)


def sharding(names: Any, rules: Any) -> Any:
    """Of an activation, where it is called."""
    return axes.on_mesh(None if names is None else tuple(names), current(rules))


def layout(rules: Any) -> Layout:
    """Of the activations of a transformer layer."""
    return Layout.of(current(rules))


def param(
    module: nn.Module,
    name: str,
    init: Any,
    shape: Sequence[int],
    dtype: Any,
    names: Any,
    rules: Any,
) -> Any:
    """A parameter with logical axes."""
    if names is not None:
        init = modules.placed(init, names, current(rules))
        init = nn.with_logical_partitioning(
            init, names, rules=None if rules is None else modules.rules_of(rules)
        )
    return module.param(name, init, tuple(shape), dtype)


def weights_of(module: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Weights:
    """The kernel and the bias of a module with the fields of `Dense`."""
    shape = (*inputs, *outputs)
    of_kernel, of_bias = modules.dense_axes(
        shape, len(inputs), module.kernel_axes, module.bias_axes
    )
    init = modules.with_fan_in(module.kernel_init, len(inputs))
    kernel = param(module, "kernel", init, shape, module.param_dtype, of_kernel, module.rules)
    if not module.use_bias:
        return Weights(kernel)
    bias = param(
        module, "bias", module.bias_init, outputs, module.param_dtype, of_bias, module.rules
    )
    return Weights(kernel, bias)


class Kernel(nn.Module):
    """The parameters of a dense layer, for a module that computes with them."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    bias_init: Any = ZEROS
    kernel_axes: Any = None
    bias_axes: Any = None
    rules: Any = None

    @nn.compact
    def __call__(self) -> Weights:
        return weights_of(self, self.inputs, self.outputs)


class Scale(nn.Module):
    """The parameters of a norm, for a module that computes with them."""

    kind: str
    num_features: int
    use_bias: bool = False
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    param_dtype: Any = jnp.float32
    scale_init: Any = None
    bias_init: Any = ZEROS
    scale_axes: Any = modules.VECTOR
    rules: Any = None

    @nn.compact
    def __call__(self) -> Norm:
        return norm_of(self, self.kind, self.num_features)


def norm_of(module: Any, kind: str, num_features: int) -> Norm:
    """The parameters of a module with the fields of `LayerNorm`; biases of a LayerNorm alone."""
    names = modules.axes_for(type(module).__name__, "scale_axes", module.scale_axes, 1)
    init = module.scale_init or (ZEROS if module.zero_centered_gamma else ONES)
    shape = (num_features,)

    def of(name: str, init: Any) -> Any:
        return param(module, name, init, shape, module.param_dtype, names, module.rules)

    gamma = of("scale", init)
    beta = of("bias", module.bias_init) if module.use_bias and kind == "layer_norm" else None
    return Norm(gamma, beta, kind, module.epsilon, module.zero_centered_gamma)
