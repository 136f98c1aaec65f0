"""How the Linen modules keep parameters: boxed with logical axes, as Flax does it."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardops.layers import arguments, axes, modules, states
from shardops.layers.axes import Layout
from shardops.layers.projections import Norm, NormKind, Weights

KERNEL_INIT = nn.initializers.lecun_normal()
ZEROS = nn.initializers.zeros_init()
ONES = nn.initializers.ones_init()
OVERWRITE = "_overwrite_with_gradient"  # the collection that training loops replace by its gradient


def current(rules: Any) -> Any:
    """The rules of a module, else those of Flax's context."""
    return nn.get_logical_axis_rules() if rules is None else arguments.rules(rules)


def sharding(names: Any, rules: Any) -> Any:
    """Of an activation, where it is called."""
    return axes.on_mesh(None if names is None else tuple(names), current(rules))


def layout(rules: Any, batch_first: bool) -> Layout:
    """Of the activations of a transformer layer."""
    return Layout.of(current(rules), batch_first)


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
        if jax.sharding.get_abstract_mesh().explicit_axes:
            init = modules.placed(init, names, current(rules))
        own = None if rules is None else arguments.rules(rules)
        init = nn.with_logical_partitioning(
            init, names, rules=() if modules.on_mixed_axes() else own
        )
    return module.param(name, init, tuple(shape), dtype)


def weights_of(module: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Weights:
    """The kernel and the bias of a module with the fields of `Dense`."""
    op, rules = op_of(module), current(module.rules)
    arguments.dtypes(op, getattr(module, "dtype", None), module.param_dtype)
    shape = (*inputs, *outputs)
    of_kernel, of_bias = modules.dense_axes(
        op, shape, len(inputs), module.kernel_axes, module.bias_axes, rules
    )
    init = modules.with_fan_in(module.kernel_init, len(inputs))
    kernel = param(module, "kernel", init, shape, module.param_dtype, of_kernel, module.rules)
    if not module.use_bias:
        return Weights(kernel)
    bias = param(
        module, "bias", module.bias_init, outputs, module.param_dtype, of_bias, module.rules
    )
    return Weights(kernel, bias)


def op_of(module: Any) -> str:
    """What errors name: the user's module, where this one holds its parameters."""
    return getattr(module, "op", type(module).__name__)


def quantizers(module: Any, name: str = "quantizers") -> Any:
    """The quantisers of a product by the module's recipe; their state is a variable, if any."""
    op, recipe, path = op_of(module), module.recipe, ".".join((*module.path, name))
    fresh = states.fresh(op, recipe)
    if fresh is None:
        return states.quantizers(op, recipe, None)
    if not module.is_initializing() and not module.has_variable(OVERWRITE, name):
        return states.quantizers(op, recipe, None, path)
    state = module.variable(OVERWRITE, name, lambda: fresh).value
    return states.quantizers(op, recipe, state, path)


class Kernel(nn.Module):
    """The parameters and quantisers of a dense layer, for a module that computes with them.

    op: the name of that module, in errors.
    """

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    bias_init: Any = ZEROS
    kernel_axes: Any = None
    bias_axes: Any = None
    rules: Any = None
    recipe: Any = None

    @nn.compact
    def __call__(self) -> tuple[Weights, Any]:
        return weights_of(self, self.inputs, self.outputs), quantizers(self)


class Scale(nn.Module):
    """The parameters of a norm, for a module that computes with them."""

    op: str
    kind: NormKind
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


def norm_of(module: Any, kind: NormKind, num_features: int) -> Norm:
    """The parameters of a module with the fields of `LayerNorm`; biases of a LayerNorm alone."""
    op = op_of(module)
    arguments.dtypes(op, getattr(module, "dtype", None), module.param_dtype)
    names = arguments.names(op, "scale_axes", module.scale_axes, 1)
    init = module.scale_init or (ZEROS if module.zero_centered_gamma else ONES)
    shape = (num_features,)

    def of(name: str, init: Any) -> Any:
        return param(module, name, init, shape, module.param_dtype, names, module.rules)

    gamma = of("scale", init)
    beta = of("bias", module.bias_init) if module.use_bias and kind == "layer_norm" else None
    return Norm(gamma, beta, kind, module.epsilon, module.zero_centered_gamma)
