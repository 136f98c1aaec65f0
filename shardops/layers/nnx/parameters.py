"""How the NNX modules keep parameters: Flax's variables, with logical axes as their metadata."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
from flax.linen import get_logical_axis_rules

from shardops.layers import axes, modules
from shardops.layers.axes import Layout, Rules


def param(
    init: Any, rngs: nnx.Rngs, shape: Sequence[int], dtype: Any, names: Any, rules: Rules
) -> nnx.Param:
    """A parameter with logical axes, placed on the mesh if there is one and a rule for each."""
    if names is not None:
        metadata = {"sharding_rules": rules} if rules else {}
        eager = nnx.using_eager_sharding() and axes.resolvable(names, rules)
        init = nnx.with_partitioning(init, names, eager_sharding=eager, **metadata)
    return nnx.Param(init(rngs.params(), tuple(shape), dtype))


def value(variable: Any) -> Any:
    """The array of a variable that there may be."""
    return None if variable is None else variable[...]


class Ruled(nnx.Module):
    """A module with rules for logical axes: its own, else those of Flax's context."""

    def __init__(self, rules: Rules | None) -> None:
        self.rules = modules.rules_of(get_logical_axis_rules() if rules is None else rules)

    def sharding(self, names: Any) -> Any:
        """Of an activation, where it is called."""
        return axes.on_mesh(names, self._current())

    def layout(self) -> Layout:
        """Of the activations of a transformer layer."""
        return Layout.of(self._current())

    def _current(self) -> Any:
        return self.rules or get_logical_axis_rules()
