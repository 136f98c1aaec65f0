"""Products of a recipe as a Linen module, for layers of others that take a `dot_general_cls`."""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer

import shardops as so
from shardops.layers import drop_in, states
from shardops.layers.linen.parameters import OVERWRITE
from shardops.quantizer import ROLES

OBSERVED = "observed"  # beside the state of a product: that it is watched


class DotGeneral(nn.Module):
    """A module in the place of `jax.lax.dot_general`, with the state of its recipe.

        nn.Dense(8, dot_general_cls=functools.partial(DotGeneral, recipe=recipe))

    As `shardops.layers.drop_in.DotGeneral`; recipes with state too. That lies in the collection
    `_overwrite_with_gradient`, an array for each scale and history. Its gradient is the state of
    the next step: training loops that replace it by its gradient need no more, where a gradient
    calls the module once. Several microbatches, or a layer that is shared, want `watch(variables,
    recipe=recipe)` of this package at the top of what is differentiated: then their magnitudes are
    combined by maximum, and histories roll once.

    Attributes:
      recipe: of `so.recipes`; None: products of the operands as they are.
    """

    recipe: Any = None

    @nn.compact
    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        return drop_in.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            quantizers=self._quantizers(),
        )

    def _quantizers(self) -> Any:
        fresh = states.fresh("DotGeneral", self.recipe)
        if fresh is None:
            return states.quantizers("DotGeneral", self.recipe, None)
        kept = {name: self._leaf(name, leaf) for name, leaf in as_leaves(fresh).items()}
        state = states.quantizers("DotGeneral", self.recipe, of_leaves(fresh, kept))
        if self.has_variable(OVERWRITE, f"input_{OBSERVED}"):
            seen = {r: self.get_variable(OVERWRITE, f"{r}_{OBSERVED}") for r in ROLES}
            watched = {r: replace(getattr(state, r), observed=seen[r]) for r in ROLES}
            return replace(state, **watched)
        if self.is_initializing() or not any(isinstance(a, Tracer) for a in kept.values()):
            return state
        return so.recipes.watch(state, overwrite=True)

    def _leaf(self, name: str, fresh: jax.Array) -> jax.Array:
        if not self.is_initializing() and not self.has_variable(OVERWRITE, name):
            return states.quantizers("DotGeneral", self.recipe, None)  # says what is missing
        return self.variable(OVERWRITE, name, lambda: fresh).value


class Einsum(nn.Module):
    """`jnp.einsum` whose products are those of a recipe.

    Attributes:
      recipe: of `so.recipes`, one without state; None: products of the operands as they are.
    """

    recipe: Any = None

    @nn.compact
    def __call__(self, equation: str, *operands: Any, **options: Any) -> jax.Array:
        dot_general = drop_in.DotGeneral(self.recipe)
        return jnp.einsum(equation, *operands, **{**options, "_dot_general": dot_general})


def as_leaves(state: Any) -> dict[str, Any]:
    """Quantisers as arrays of their own: input.scale_inv is input_scale_inv."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(p, simple=True, separator="_"): leaf for p, leaf in leaves}


def of_leaves(like: Any, leaves: Any) -> Any:
    """The quantisers that are kept as these arrays, of the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in as_leaves(like)])
