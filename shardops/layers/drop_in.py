"""Products and norms of existing models: what takes the place of `jax.lax.dot_general` there."""

from typing import Any

import jax

import shardops as so
from shardops.errors import shown, wrong
from shardops.layers import states
from shardops.primitives import check


class DotGeneral:
    """A drop-in for `jax.lax.dot_general` whose products follow a recipe.

        nnx.Linear(8, 8, dot_general=DotGeneral(so.recipes.CurrentScaling()), rngs=rngs)

    A product with batch dims, such as attention's, is `so.dot_general`, and so is every product
    where the recipe is None. Others are `so.dense`, in 8 bits, gradients included.

    Args:
      recipe: of `so.recipes`, one without state: a function has nowhere to keep it.
    Raises: ValueError for DelayedScaling.
    """

    def __init__(self, recipe: Any = None) -> None:
        if states.fresh("DotGeneral", recipe) is not None:
            want = "a recipe without state"
            fix = "Take CurrentScaling, or the modules of shardops.layers, which keep state."
            raise ValueError(wrong("DotGeneral", "recipe", shown(recipe), want, fix))
        self.recipe = recipe

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
        quantizers = states.quantizers("DotGeneral", self.recipe, None)
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            quantizers=quantizers,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DotGeneral) and self.recipe == other.recipe

    def __hash__(self) -> int:
        return hash((DotGeneral, self.recipe))


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    quantizers: Any = None,
) -> jax.Array:
    """`so.dot_general`, or `so.dense` by quantisers where the product has no batch dims."""
    contracting, batch = dimension_numbers
    if quantizers is None or any(batch) or not _floats(lhs, rhs):
        return so.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )
    return so.dense(
        lhs,
        rhs,
        contracting_dims=contracting,
        quantizers=quantizers,
        out_dtype=preferred_element_type,
        out_sharding=out_sharding,
    )


def _floats(*arrays: Any) -> bool:
    return all(hasattr(a, "dtype") and a.dtype.name in check.FLOATS for a in arrays)
