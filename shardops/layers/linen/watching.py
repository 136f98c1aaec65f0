"""Linen variables whose state of delayed scaling is watched."""

from collections.abc import Mapping
from typing import Any

import shardops as so
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
      recipe: of each `DotGeneral` among the modules, whose state does not say it; None: each of
        them watches its own, which a step may then use once.
      overwrite: as in `so.recipes.watch`: whether these cotangents are the state of the next step.
    Raises: as `so.recipes.watch`; ValueError where histories of a `DotGeneral` are of another
      length.
    """
    if OVERWRITE not in variables:
        return variables
    fresh = None if recipe is None else states.fresh("watch", recipe)

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
