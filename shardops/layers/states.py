"""Recipes of modules, and their state with delayed scaling.

State is a pytree of its own beside the parameters, the `DenseQuantizers` of each product. What a
step saw comes back as its cotangent: decision 0019, `so.recipes.watch`.
"""

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax

from shardops.errors import wrong
from shardops.kernels.gemm_scaled_plan import Kind, Side, scaled_plan
from shardops.kernels.target import current_target
from shardops.primitives.scaling import ScalingMode
from shardops.quantizer import ROLES, Quantizer

_KINDS: dict[ScalingMode, Kind] = {
    ScalingMode.TENSOR_DELAYED: "tensor",
    ScalingMode.TENSOR_CURRENT: "tensor",
    ScalingMode.BLOCK_128: "block_128",
    ScalingMode.MXFP8: "mxfp8",
}


def fresh(op: str, recipe: Any) -> Any:
    """State before the first step; None where there is no recipe, or one without state."""
    made = _made(op, recipe)
    return made if made is not None and jax.tree.leaves(made) else None


def quantizers(op: str, recipe: Any, state: Any, path: str = "") -> Any:
    """The quantisers of one product: state as it is kept or watched, or those of the recipe.

    path: where the state of `op` is kept, in errors.
    Raises: TypeError for a recipe that is none; ValueError where state is missing, or is that of
      another recipe.
    """
    made = _made(op, recipe)
    if made is None or not jax.tree.leaves(made):
        return made
    if not isinstance(state, type(made)):
        got = "missing" if state is None else f"a {type(state).__name__}"
        fix = (
            "Initialise the module with this recipe, and pass its state along with the parameters."
        )
        where = f" {path}" if path else ""
        raise ValueError(wrong(op, f"delayed state{where}", got, "a DenseQuantizers", fix))
    at = f"{path}." if path else "of the "
    for role in ROLES:
        have, want = getattr(state, role), getattr(made, role)
        if _kind(have) != _kind(want):
            fix = "It is of another recipe or model: initialise state anew, or change the recipe."
            raise ValueError(wrong(op, f"delayed state {at}{role}", _kind(have), _kind(want), fix))
    return state


def _made(op: str, recipe: Any) -> Any:
    if recipe is None:
        return None
    is_class = isinstance(recipe, type)
    if is_class or not hasattr(recipe, "dense_quantizers"):
        want, fix = "one of so.recipes, or None", "Pass so.recipes.CurrentScaling() or another."
        got = f"the class {recipe.__name__}" if is_class else f"a {type(recipe).__name__}"
        raise TypeError(wrong(op, "recipe", got, want, fix))
    if jax.default_backend() == "gpu":
        _say_what_runs_instead(recipe, current_target().arch)
    return recipe.dense_quantizers()


@lru_cache
def _say_what_runs_instead(recipe: Any, arch: str) -> None:
    """Warn, once, where a GPU has no 8-bit products of a recipe."""
    made = recipe.dense_quantizers()
    x, kernel = (
        Side((128, 128), q.format, _KINDS[q.mode], q.block) for q in (made.input, made.kernel)
    )
    plan = scaled_plan(x, kernel, ((1,), (1,)), ((), ()), arch)
    if plan.route != "fp8":
        warnings.warn(f"{recipe}: products run otherwise on this GPU: {plan.why}.", stacklevel=2)


def _kind(quantizer: Any) -> str:
    """What must agree between state and a recipe."""
    if not isinstance(quantizer, Quantizer):
        return f"a {type(quantizer).__name__}"
    static = replace(quantizer, scale_inv=None, amax_history=None, observed=None)
    history = quantizer.amax_history
    steps = "no" if history is None else history.shape[-1]
    return (
        f"{static.format}, {static.mode.name}, margin {static.margin}, "
        f"{static.amax_compute} of {steps} steps"
    )
