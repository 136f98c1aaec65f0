"""How the NNX modules keep parameters and state: Flax's variables, logical axes their metadata."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from flax.linen import get_logical_axis_rules
from jax.sharding import PartitionSpec

import shardops as so
from shardops.errors import wrong
from shardops.layers import arguments, axes, modules, states
from shardops.layers.axes import Layout, Rules


class QuantizerState(nnx.Variable):
    """The state of delayed scaling of one product: a `DenseQuantizers`.

    Each of its arrays is whole on every device. Flax asks variables for one spec, or gives them
    one, as to arrays: here it is that of all of them.
    """

    @property
    def sharding(self) -> PartitionSpec:
        return PartitionSpec()

    def replace(self, *value: Any, **options: Any) -> Any:
        if value and (value[0] is None or isinstance(value[0], PartitionSpec)):
            value = (jax.tree.map(lambda _: PartitionSpec(), self.get_value()),)
        return super().replace(*value, **options)


def watch(model: Any, *, overwrite: bool = True) -> Any:
    """The same model, the cotangents of whose `QuantizerState` are what its layers saw.

    Begin the function that is differentiated with it, before loops over microbatches.

        def loss(model, batch):
            model = watch(model)
            ...

        wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
        gradients = nnx.grad(loss, argnums=wrt)(model, batch)
        nnx.update(model, nnx.filter_state(gradients, QuantizerState))

    Args:
      overwrite: as in `so.recipes.watch`: whether these cotangents are the state of the next step.
    """
    graph, state, rest = nnx.split(model, QuantizerState, ...)
    return nnx.merge(graph, so.recipes.watch(state, overwrite=overwrite), rest)


def param(
    init: Any, rngs: nnx.Rngs, shape: Sequence[int], dtype: Any, names: Any, rules: Rules
) -> nnx.Param:
    """A parameter with logical axes, placed on the mesh if there is one and a rule for each."""
    if not isinstance(rngs, nnx.Rngs):
        got, fix = f"a {type(rngs).__name__}", "Pass nnx.Rngs(0), or that of the model."
        raise TypeError(wrong("layers", "rngs", got, "an nnx.Rngs", fix))
    if names is not None:
        metadata: dict[str, Any] = {}
        if rules and rules != arguments.rules(get_logical_axis_rules()):
            metadata["sharding_rules"] = rules  # Flax knows those of its context
        eager = nnx.using_eager_sharding() and axes.resolvable(names, rules)
        if eager and (modules.on_mixed_axes() or modules.cut_twice(names, rules)):
            init, eager = modules.placed(init, names, rules), False
        init = nnx.with_partitioning(init, names, eager_sharding=eager, **metadata)
    return nnx.Param(init(rngs.params(), tuple(shape), dtype))


def value(variable: Any) -> Any:
    """The array of a variable that there may be."""
    return None if variable is None else variable[...]


class Ruled(nnx.Module):
    """A module with rules for logical axes: its own, else those of Flax's context."""

    def __init__(self, rules: Rules | None) -> None:
        self.rules = arguments.rules(get_logical_axis_rules() if rules is None else rules)

    def sharding(self, names: Any) -> Any:
        """Of an activation, where it is called."""
        return axes.on_mesh(names, self._current())

    def layout(self, batch_first: bool) -> Layout:
        """Of the activations of a transformer layer."""
        return Layout.of(self._current(), batch_first)

    def _current(self) -> Any:
        return self.rules or get_logical_axis_rules()


def state_of(op: str, recipe: Any) -> Any:
    """A variable for the state of a recipe that has one."""
    fresh = states.fresh(op, recipe)
    return nnx.data(None if fresh is None else QuantizerState(fresh))


def quantizers(op: str, recipe: Any, state: QuantizerState | None) -> Any:
    """The quantisers of a product."""
    return states.quantizers(op, recipe, None if state is None else state.get_value())
