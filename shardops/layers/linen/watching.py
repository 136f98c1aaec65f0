"""Linen variables whose state of delayed scaling is watched."""

from collections.abc import Mapping
from typing import Any

import shardops as so
from shardops.errors import shown, wrong
from shardops.layers import states
from shardops.layers.linen.dot_general import as_leaves, of_leaves
from shardops.layers.linen.parameters import OVERWRITE
from shardops.quantizer import DenseQuantizers


def watch(variables: Any, *, recipe: Any = None, overwrite: bool = True) -> Any:
    """Variables, the cotangents of whose state of delayed scaling are what layers saw.

    Begin the function that is differentiated with it, before loops over microbatches.

        def loss(variables, batch):
            variables = watch(variables)
            ...

        gradients = jax.grad(loss)(variables, batch)
        state = gradients["_overwrite_with_gradient"]  # of the next step

    Args:
      recipe: the one of each `DotGeneral` among the modules, whose state does not say it: only the
        length of its histories is compared, so pass the same object to both. None: each of them
        watches its own, which a step may then use once.
      overwrite: as in `so.recipes.watch`: whether these cotangents are the state of the next step.
    Raises: as `so.recipes.watch`; TypeError for what are no variables; ValueError for a recipe
      without state, and where histories of a `DotGeneral` are of another length.
    """
    if not isinstance(variables, Mapping):
        got, want = f"a {type(variables).__name__}", "what module.init returns"
        raise TypeError(wrong("watch", "variables", got, want, "Pass params and state in one."))
    fresh = None if recipe is None else states.fresh("watch", recipe)
    if recipe is not None and fresh is None:
        fix = "Leave it out, or pass the recipe of the modules."
        raise ValueError(wrong("watch", "recipe", shown(recipe), "a recipe with state", fix))
    if OVERWRITE not in variables:
        return variables

    def watched(node: Any, path: str) -> Any:
        if isinstance(node, DenseQuantizers):
            return so.recipes.watch(node, overwrite=overwrite)
        if not isinstance(node, Mapping):
            return node
        if fresh is not None and {*as_leaves(fresh)} == {*node}:
            state = states.quantizers("watch", recipe, of_leaves(fresh, node), path)
            return as_leaves(so.recipes.watch(state, overwrite=overwrite))
        paths = {name: f"{path}.{name}" if path else name for name in node}
        return {name: watched(of_it, paths[name]) for name, of_it in node.items()}

    return {**variables, OVERWRITE: watched(variables[OVERWRITE], "")}
