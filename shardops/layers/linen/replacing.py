"""An existing Linen model, its products and norms done by shardops."""

from collections.abc import Collection
from typing import Any

import flax.linen as nn

from shardops.layers import calls
from shardops.layers.drop_in import DotGeneral
from shardops.layers.projections import Norm, NormKind

_KINDS: dict[Any, NormKind] = {nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm"}


def with_shardops(
    model: nn.Module, recipe: Any = None, *, methods: Collection[str] = ("__call__",)
) -> Any:
    """A model of Flax's modules that multiplies and normalises by shardops.

    Replaced: the products of `nn.Dense`, `nn.DenseGeneral` and all made of them
    (`nn.MultiHeadDotProductAttention`) that have not been given a `dot_general` of their own, and
    `nn.LayerNorm` and `nn.RMSNorm` over the last dim. The others stay as they are.

    Args:
      model: any Linen module.
      recipe: of `so.recipes`, one without state; None: products of the operands as they are.
      methods: of the model, in which modules are replaced.
    Returns: a module with the same attributes, variables and parameter names.
    """
    dot_general = DotGeneral(recipe)

    def intercepted(
        call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        if context.method_name == "__call__":
            if isinstance(module, nn.Dense | nn.DenseGeneral):
                _multiply_by(module, dot_general)
            elif type(module) in _KINDS and _is_plain(module, args, kwargs):
                return _normalised(module, args[0])
        return call(*args, **kwargs)

    kind = type(model)

    def of(name: str) -> Any:
        method = getattr(kind, name)

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(intercepted):
                return method(self, *args, **kwargs)

        return replaced

    replaced = type(kind.__name__, (kind,), {name: of(name) for name in methods})
    fields = {
        name: getattr(model, name)
        for name, field in model.__dataclass_fields__.items()
        if field.init and name != "parent"
    }
    return replaced(**fields)


def _multiply_by(module: Any, dot_general: DotGeneral) -> None:
    """Set on a frozen module as it is used: a call of the model makes its modules anew."""
    if module.dot_general is None and module.dot_general_cls is None:
        object.__setattr__(module, "dot_general", dot_general)


def _is_plain(module: Any, args: Any, kwargs: Any) -> bool:
    """Whether a norm of Flax is one that shardops has, called to compute."""
    axes = (module.reduction_axes, module.feature_axes)
    over_last = all(axis in (-1, (-1,)) for axis in axes) and module.axis_name is None
    called = len(args) == 1 and not kwargs and not module.is_initializing()
    return over_last and called and module.use_scale


def _normalised(module: Any, x: Any) -> Any:
    def of(name: str) -> Any:
        return nn.unbox(module.get_variable("params", name))

    beta = of("bias") if getattr(module, "use_bias", False) else None
    return calls.norm(
        x, Norm(of("scale"), beta, _KINDS[type(module)], module.epsilon), module.dtype
    )
