"""An existing Linen model, its products and norms done by shardops."""

import functools
from collections.abc import Collection
from typing import Any

import flax.linen as nn

from shardops.errors import shown, wrong
from shardops.layers import calls
from shardops.layers.drop_in import DotGeneral
from shardops.layers.projections import Norm, NormKind

_KINDS: dict[Any, NormKind] = {nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm"}


_FROM = "shardops_replaced_from"  # the user's class, on what is made of it


def with_shardops(
    model: nn.Module, recipe: Any = None, *, methods: Collection[str] = ("__call__",)
) -> Any:
    """A model of Flax's modules that multiplies and normalises by shardops.

    Replaced: the products of `nn.Dense`, `nn.DenseGeneral` and all made of them
    (`nn.MultiHeadDotProductAttention`) that have not been given a `dot_general` of their own, and
    `nn.LayerNorm` and `nn.RMSNorm` over the last dim. The others stay as they are.

    Args:
      model: any Linen module; of one that is replaced already, the module before.
      recipe: of `so.recipes`, one without state; None: products of the operands as they are.
      methods: of the model, in which modules are replaced.
    Returns: a module with the same attributes, variables and parameter names, which pickles where
      the model does. Models that are equal give equal ones.
    Raises: TypeError for what is no Linen module or no list of names, ValueError for a method that
      the model does not have, and for a model that is bound, or a submodule of another one already.
    """
    _check(model, methods)
    kind = getattr(type(model), _FROM, type(model))
    return _made(kind, recipe, tuple(methods), _fields(model))


def _check(model: Any, methods: Any) -> None:
    op = "with_shardops"
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        got = f"the class {model.__name__}" if is_class else f"a {type(model).__name__}"
        fix = "Models of NNX are for shardops.layers.nnx.with_shardops."
        raise TypeError(wrong(op, "model", got, "a Linen module", fix))
    if model.scope is not None:
        name = "bound to variables" if model.name is None else f"the submodule {model.name} already"
        fix = "Give it the whole model, or in a compact method one made with parent=None."
        raise ValueError(wrong(op, "model", name, "a module that nothing holds yet", fix))
    if isinstance(methods, str) or not isinstance(methods, Collection):
        fix = "Pass a tuple of them."
        raise TypeError(wrong(op, "methods", shown(methods), "names of methods", fix))
    for name in methods:
        if not callable(getattr(type(model), name, None)):
            want = f"methods of {type(model).__name__}"
            fix = "Name those in which it calls its layers."
            raise ValueError(wrong(op, "methods", shown(name), want, fix))


def _fields(model: Any) -> dict[str, Any]:
    return {
        name: getattr(model, name)
        for name, field in model.__dataclass_fields__.items()
        if field.init and name != "parent"
    }


def _made(kind: Any, recipe: Any, methods: tuple[str, ...], fields: dict[str, Any]) -> Any:
    return _replaced(kind, DotGeneral(recipe), methods)(**fields)


@functools.cache
def _replaced(kind: Any, dot_general: DotGeneral, methods: tuple[str, ...]) -> Any:
    """One class for all models of a kind: classes that are made anew are equal to no other."""

    def intercepted(
        call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        if context.method_name == "__call__":
            if isinstance(module, nn.Dense | nn.DenseGeneral):
                _multiply_by(module, dot_general)
            elif _kind_of(module) is not None and _is_plain(module, args, kwargs):
                return _normalised(module, args[0])
        return call(*args, **kwargs)

    def of(name: str) -> Any:
        method = getattr(kind, name)

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(intercepted):
                return method(self, *args, **kwargs)

        return replaced

    def reduced(self: Any) -> Any:
        """How it pickles: a class that is made is to be found under no name."""
        return _made, (kind, dot_general.recipe, methods, _fields(self))

    members = {"__reduce__": reduced, "__module__": kind.__module__, _FROM: kind}
    return type(kind.__name__, (kind,), {**members, **{name: of(name) for name in methods}})


def _kind_of(module: Any) -> NormKind | None:
    return _KINDS.get(getattr(type(module), _FROM, type(module)))


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
    kind = _kind_of(module)
    assert kind is not None
    return calls.norm(x, Norm(of("scale"), beta, kind, module.epsilon), module.dtype)
