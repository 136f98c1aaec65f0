"""State of delayed scaling through a derivative: what layers saw, and the next step's state."""

import weakref
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

# Private: there is no public way to ask whether types are checked, or what is being traced.
from jax._src import config, core

from shardops import array_type
from shardops.errors import wrong
from shardops.maxima import as_maximum, as_number, is_traced
from shardops.op import with_derivative
from shardops.quantizer import Quantizer

Tree = TypeVar("Tree")


def watch(quantizers: Tree, *, overwrite: bool = False) -> Tree:
    """State of delayed scaling whose cotangent is what layers saw, largest magnitudes combined.

    Call it once, at the top of the function that is differentiated, before loops over microbatches
    and before anything that uses the state twice. JAX adds the cotangents of several uses; those
    of what this returns are combined by maximum, exactly, through `scan`, `checkpoint`, `vmap` and
    `shard_map`. Quantisers of other modes pass as they are.

    Args:
      quantizers: any pytree of Quantizers and DenseQuantizers, state stacked over layers included.
      overwrite: what the cotangent is. False: the largest magnitudes of inputs, kernels and
        gradients in the place of `scale_inv`, for `update`; of several calls they are combined by
        `jax.tree.map(jnp.maximum, …)`. True: the state of the next step, as training loops that
        overwrite state with its gradient want it.
    Returns: the same pytree, for layers.
    Raises: TypeError for what is no Quantizer; NotImplementedError outside of `jax.jit`, and inside
      of a `shard_map` with check_vma=False; ValueError for what is watched already, and where a
      gradient is taken through two calls, or through a loop around one, which JAX would add up
      (calls in jits of their own are not seen).
    Sharding: the state is replicated, and so are its cotangents.
    """
    return _map(lambda q: _watched(q, overwrite), quantizers)


def update(quantizers: Tree, observed: Tree) -> Tree:
    """The state of the next step: each quantiser's `update`, once a step.

    Args:
      quantizers: the state of this step.
      observed: its cotangent by a function that calls `watch`.
        Where that overwrites, it is the next state already, and is returned.
    Returns: the same pytree as `quantizers`.
    Raises: TypeError for what is no Quantizer, ValueError where `observed` is of other quantisers.
    """
    have, given = (jax.tree.structure(t) for t in (quantizers, observed))
    if have != given:
        fix = "Pass what jax.grad gives for them: state and cotangents of one model."
        raise ValueError(wrong("update", "observed", f"of structure {given}", f"{have}", fix))
    return _map(_updated, quantizers, observed)


def _map(function: Any, quantizers: Any, *rest: Any) -> Any:
    return jax.tree.map(
        function, quantizers, *rest, is_leaf=lambda value: isinstance(value, Quantizer)
    )


def _updated(quantizer: Any, observed: Any) -> Quantizer:
    _check("update", quantizer)
    if quantizer.scale_inv is None:
        return quantizer
    have, given = (jnp.shape(q.amax_history) for q in (quantizer, observed))
    if have != given:
        fix = "It is of another recipe: pass what jax.grad gives for this state."
        got = f"of histories of shape {given}"
        raise ValueError(wrong("update", "observed", got, f"{have}", fix))
    # What is observed has -1 in the place of a history, and what no layer used is 0 throughout.
    overwritten = (observed.amax_history[..., 0] >= 0) & (observed.scale_inv > 0)
    by_amax = _next(quantizer, observed.scale_inv)
    kept = {
        name: jnp.where(of, getattr(observed, name), getattr(by_amax, name))
        for name, of in (("scale_inv", overwritten), ("amax_history", overwritten[..., None]))
    }
    return replace(by_amax, **kept)


def _check(op: str, quantizer: Any) -> None:
    fix = "Take the state that a recipe's dense_quantizers() begins with."
    if not isinstance(quantizer, Quantizer):
        got = f"a tree with a {type(quantizer).__name__}"
        raise TypeError(wrong(op, "quantizers", got, "Quantizers and DenseQuantizers", fix))
    if (quantizer.scale_inv is None) != (quantizer.amax_history is None):
        got = (
            "delayed state without "
            + ("scale_inv", "amax_history")[quantizer.scale_inv is not None]
        )
        raise ValueError(wrong(op, "quantizers", got, "both of its arrays", fix))


def _next(quantizer: Quantizer, amax: Any) -> Quantizer:
    """`update`, of state that is stacked too."""
    step = Quantizer.update
    for _ in range(jnp.ndim(jnp.asarray(quantizer.scale_inv))):
        step = jax.vmap(step)
    return step(quantizer, amax)


def _watched(quantizer: Any, overwrite: bool) -> Quantizer:
    _check("watch", quantizer)
    if quantizer.scale_inv is None:
        return quantizer
    if quantizer.observed is not None:
        got, fix = "watched already", "Call watch once, at the top of what is differentiated."
        raise ValueError(wrong("watch", "quantizers", got, "state that nobody watches yet", fix))
    if not is_traced():
        raise NotImplementedError(
            "watch: quantizers are watched outside of a jit; expected a function inside of one, "
            "as JAX has no arrays of what it combines by maximum elsewhere. Wrap it in jax.jit."
        )
    _refuse_unchecked()
    statics = replace(quantizer, scale_inv=None, amax_history=None, observed=None)
    how = _How(overwrite, _added_by_jax(quantizer.scale_inv))
    scale_inv, history, observed = _watch(statics, how, quantizer.scale_inv, quantizer.amax_history)
    return replace(quantizer, scale_inv=scale_inv, amax_history=history, observed=observed)


def _refuse_unchecked() -> None:
    """Inside a shard_map whose types do not say what varies, JAX adds cotangents over devices."""
    if jax.sharding.get_abstract_mesh().manual_axes and not config._check_vma.value:
        raise NotImplementedError(
            "watch: quantizers are watched inside a shard_map with check_vma=False; expected True, "
            "as JAX adds up what devices see otherwise. Leave check_vma out."
        )


_LOOPS = ("scan", "fori_loop", "while_body")  # what JAX says their bodies are traced for

_watched_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class _How(NamedTuple):
    """Statics of one `watch`: whether its cotangent is the next state, and why it has none."""

    overwrite: bool
    refusal: str


def _added_by_jax(scale_inv: Any) -> str:
    """What JAX adds before anything is combined: state watched twice, or in each iteration.

    An error of a derivative alone: without one there is nothing to add.
    """
    if not isinstance(scale_inv, core.Tracer):  # nothing differentiates it
        return ""
    fix = (
        "Call watch once, at the top of what is differentiated; linen.watch(variables, recipe=...) "
        "where a linen.DotGeneral calls it."
    )
    want = "state that is watched once, before loops"
    now = trace = core.trace_ctx.trace
    while trace is not None and trace is not scale_inv._trace:
        frame = getattr(trace, "frame", None)
        if frame is not None and frame.debug_info.traced_for in _LOOPS:
            loop = frame.debug_info.traced_for
            got = f"of outside of the {loop} in which it is watched"
            return wrong("watch", "quantizers", got, want, fix)
        trace = getattr(trace, "parent_trace", None)
    before = _watched_in.setdefault(now, [])
    if any(ref() is scale_inv for ref in before):
        return wrong("watch", "quantizers", "watched a second time", want, fix)
    before.append(weakref.ref(scale_inv))
    return ""


@with_derivative
def _watch(statics: Quantizer, how: _How, scale_inv: jax.Array, history: Any) -> Any:
    return scale_inv, history, as_maximum(jnp.zeros_like(scale_inv))


def _save(statics: Quantizer, how: _How, scale_inv: jax.Array, history: Any) -> Any:
    if how.refusal:
        raise ValueError(how.refusal)
    return _watch(statics, how, scale_inv, history), (scale_inv, history)


def _pull(statics: Quantizer, how: _How, saved: Any, cotangents: Any) -> Any:
    scale_inv, history = saved
    amax = array_type.Type.of(scale_inv).apply(as_number(cotangents[2]))
    if not how.overwrite:
        return amax, jnp.full_like(history, -1)
    state = _next(replace(statics, scale_inv=scale_inv, amax_history=history), amax)
    return state.scale_inv, state.amax_history


_watch.defvjp(_save, _pull)
