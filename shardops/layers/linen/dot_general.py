"""Products of a recipe as a Linen module, for layers of others that take a `dot_general_cls`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer

import shardops as so
from shardops.layers import drop_in, states
from shardops.layers.linen.parameters import OVERWRITE


class DotGeneral(nn.Module):
    """A module in the place of `jax.lax.dot_general`, with the state of its recipe.

        nn.Dense(8, dot_general_cls=functools.partial(DotGeneral, recipe=recipe))

    As `shardops.layers.drop_in.DotGeneral`; recipes with state too. That lies in the collection
    `_overwrite_with_gradient`, an array for each scale and history. Its gradient is the state of
    the next step: training loops that replace it by its gradient need no more. So a step calls a
    module once: several microbatches, or a layer that is shared, want the modules of
    `shardops.layers.linen` and their `watch`.

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
        leaves, structure = jax.tree.flatten_with_path(fresh)
        state = [self._leaf(_name(path), leaf) for path, leaf in leaves]
        kept = jax.tree.unflatten(structure, state)
        if self.is_initializing() or not any(isinstance(a, Tracer) for a in state):
            return kept
        return so.recipes.watch(kept, overwrite=True)

    def _leaf(self, name: str, fresh: jax.Array) -> jax.Array:
        if not self.is_initializing() and not self.has_variable(OVERWRITE, name):
            return states.quantizers("DotGeneral", self.recipe, None)  # says what is missing
        return self.variable(OVERWRITE, name, lambda: fresh).value


class Einsum(nn.Module):
    """`jnp.einsum` whose products are those of a recipe without state. Attributes as above."""

    recipe: Any = None

    @nn.compact
    def __call__(self, equation: str, *operands: Any, **options: Any) -> jax.Array:
        dot_general = drop_in.DotGeneral(self.recipe)
        return jnp.einsum(equation, *operands, **{**options, "_dot_general": dot_general})


def _name(path: Any) -> str:
    """input.scale_inv -> input_scale_inv."""
    return jax.tree_util.keystr(path, simple=True, separator="_")
