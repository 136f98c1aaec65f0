"""Logical axes: names of dims in a model, which a user's rules give axes of the mesh.

Parameters and activations of the modules use these:

| name | dim |
|---|---|
| "batch" | sequences of a batch |
| "sequence" | positions of the residual stream, between the products of a layer |
| "embed" | features of the residual stream, in kernels |
| "heads", "kv_heads" | heads of queries (and of what attention gives), of keys and values |
| "head_dim" | features of a head |
| "mlp" | hidden features |

Rules are pairs, as in Flax: (name, axis of the mesh | tuple of axes | None).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardops.errors import shown, wrong

Names = tuple[str | None, ...]
Rules = Sequence[tuple[str, Any]]

NAMES = ("batch", "sequence", "embed", "heads", "kv_heads", "head_dim", "mlp")

# Of activations whose batch is first.
STREAM: Names = ("batch", "sequence", None)
HEADS: Names = ("batch", None, "heads", None)
HIDDEN: Names = ("batch", None, "mlp")
ACTIVATIONS = (STREAM, HEADS, HIDDEN)


@dataclass(frozen=True)
class Layout:
    """Where the activations of a transformer layer lie; None: where their operands put them.

    Attributes:
      batch_first: the order of the first two dims of each, [batch, sequence, ...] as below, or
        [sequence, batch, ...].
      stream: [batch, sequence, embed], between the products of a layer.
      heads: [batch, sequence, heads, head_dim], in attention.
      hidden: [batch, sequence, mlp], in the MLP.
      gathered: [batch, sequence, embed], what the products into heads and hidden features read,
        gathered once for both passes: a value of its own, which `checkpoint_policies.save_gathered`
        keeps. None: each pass gathers it for itself. On meshes of Explicit axes alone.
    """

    stream: PartitionSpec | None = None
    heads: PartitionSpec | None = None
    hidden: PartitionSpec | None = None
    gathered: PartitionSpec | None = None
    batch_first: bool = True

    @classmethod
    def of(cls, rules: Rules, batch_first: bool = True) -> "Layout":
        """The layout that rules give, on the axes of the ambient mesh that are not manual."""
        specs = (on_mesh(ordered(names, batch_first), rules) for names in ACTIVATIONS)
        return cls(*specs, batch_first=batch_first)

    @property
    def batch(self) -> int:
        """The dim of the sequences of a batch."""
        return 0 if self.batch_first else 1

    def gathering(self) -> "Layout":
        """The same, with inputs of products gathered once along the sequence for both passes."""
        if self.stream is None:
            return self
        batch = self.stream.partitions[self.batch]
        rows = (batch, None) if self.batch_first else (None, batch)
        return replace(self, gathered=PartitionSpec(*rows, None))


def ordered(names: Names, batch_first: bool) -> Names:
    """Names of an activation whose first two dims are batch and sequence, or sequence and batch."""
    return names if batch_first else (names[1], names[0], *names[2:])


def resolve(names: Names, rules: Rules) -> PartitionSpec:
    """The spec of an array with these dims: for each name its first rule whose axes are free."""
    entries: list[Any] = [None] * len(names)
    used: set[str] = set()
    for name, axes in rules:
        if name not in names or entries[names.index(name)] is not None or axes is None:
            continue
        wanted = {axes} if isinstance(axes, str) else {*axes}
        if not wanted & used:
            entries[names.index(name)] = axes if isinstance(axes, str) else tuple(axes)
            used |= wanted
    return PartitionSpec(*entries)


def on_mesh(names: Names | None, rules: Rules) -> PartitionSpec | None:
    """The sharding of an activation on the ambient mesh.

    Manual axes are left out: inside a `shard_map` over them each device has its own part.
    Returns: None where there is no mesh, or where the rules do not say of each name where it goes
      (None included): then the sharding follows from the operands.
    Raises: ValueError where a rule names an axis that the mesh does not have.
    """
    mesh = jax.sharding.get_abstract_mesh()
    known = {name for name, _ in rules}
    if names is None or mesh.empty or not {n for n in names if n is not None} <= known:
        return None
    spec = resolve(names, rules)
    for axis in jax.tree.leaves(tuple(spec)):
        if axis not in mesh.axis_names:
            got, want = f"{dict(rules)}", f"axes of the mesh, {mesh.axis_names}"
            raise ValueError(
                wrong("layers", "rules", got, want, f"Rename {shown(axis)}, or map to None.")
            )
    return PartitionSpec(*(_kept(entry, mesh.manual_axes) for entry in spec))


def resolvable(names: Names | None, rules: Rules) -> bool:
    """Whether a parameter can be placed when it is made: a mesh, and a rule for each name."""
    mesh = jax.sharding.get_abstract_mesh()
    known = {name for name, _ in rules}
    return bool(names) and not mesh.empty and {n for n in names or () if n is not None} <= known


def _kept(entry: Any, manual: Sequence[str]) -> Any:
    """An entry without manual axes."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    kept = tuple(a for a in axes if a not in manual)
    return None if not kept else kept[0] if len(kept) == 1 else kept
