"""An existing NNX model, its products and norms done by shardops."""

from typing import Any

import jax
from flax import nnx

from shardops.errors import wrong
from shardops.layers import calls
from shardops.layers.drop_in import DotGeneral
from shardops.layers.nnx.parameters import value
from shardops.layers.projections import Norm


class _LayerNorm(nnx.LayerNorm):
    """Flax's, computed by `so.layer_norm`."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        if mask is not None:
            return super().__call__(x, mask=mask)
        beta = value(self.bias)
        return calls.norm(x, Norm(value(self.scale), beta, "layer_norm", self.epsilon), self.dtype)


class _RMSNorm(nnx.RMSNorm):
    """Flax's, computed by `so.rms_norm`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        if mask is not None:
            return super().__call__(x, mask=mask)
        return calls.norm(x, Norm(value(self.scale), epsilon=self.epsilon), self.dtype)


class _Product(DotGeneral):
    """Of `with_shardops`, not of the model's own: another call may replace it."""


_NORMS = {nnx.LayerNorm: _LayerNorm, nnx.RMSNorm: _RMSNorm}


def with_shardops(model: Any, recipe: Any = None) -> Any:
    """A copy of a model of Flax's modules that multiplies and normalises by shardops.

    Replaced: the products of `nnx.Linear`, `nnx.LinearGeneral` and all made of them
    (`nnx.MultiHeadAttention`) that have not been given a `dot_general` of their own, and
    `nnx.LayerNorm` and `nnx.RMSNorm` over the last dim. The others stay as they are.

    Args:
      model: any NNX module, one that is replaced already too.
      recipe: of `so.recipes`, one without state; None: products of the operands as they are.
    Returns: a module of the same structure, state and parameter names.
    Raises: TypeError for what is no NNX module.
    """
    if not isinstance(model, nnx.Module):
        is_class = isinstance(model, type)
        got = f"the class {model.__name__}" if is_class else f"a {type(model).__name__}"
        fix = "Models of Linen are for shardops.layers.linen.with_shardops."
        raise TypeError(wrong("with_shardops", "model", got, "an NNX module", fix))
    model = nnx.clone(model)
    dot_general = _Product(recipe)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral):
            now, own = module.dot_general, getattr(module, "dot_general_cls", None)
            if own is None and (now in (None, jax.lax.dot_general) or isinstance(now, _Product)):
                module.dot_general = dot_general
        replacement = _NORMS.get(type(module))
        if replacement is not None and _over_last_dim(module):
            module.__class__ = replacement
    return model


def _over_last_dim(norm: Any) -> bool:
    axes = (norm.reduction_axes, norm.feature_axes)
    plain = all(axis in (-1, (-1,)) for axis in axes) and norm.axis_name is None
    return plain and norm.scale is not None
