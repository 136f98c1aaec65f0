"""Shardings as plain tuples, and the few operations on them that the plans need.

A `Spec` has one entry a dim; an entry is the tuple of mesh axes that shard the dim, major to minor.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
Sizes = Mapping[str, int]
AxisSizes = tuple[tuple[str, int], ...]  # the same, hashable


def to_spec(partition: Iterable[Any] | None, ndim: int) -> Spec:
    """A PartitionSpec, a tuple of its entries, or None (replicated), padded to `ndim` dims.

    An axis named a second time is dropped: it can shard one dim only. `UNCONSTRAINED` counts as
    replicated.
    """
    if isinstance(partition, PartitionSpec):
        partition = partition.partitions  # its reduced and unreduced axes lie beside these
    entries = tuple(partition or ())
    if len(entries) > ndim:
        raise ValueError(
            f"spec {partition} has {len(entries)} entries; expected at most {ndim}, one a dim. "
            "Drop the entries beyond the array's rank."
        )
    used: set[str] = set()
    spec: list[Axes] = []
    for entry in entries + (None,) * (ndim - len(entries)):
        axes = _axes_of(entry)
        spec.append(tuple(a for a in axes if a not in used))
        used.update(axes)
    return tuple(spec)


def _axes_of(entry: Any) -> Axes:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def to_partition_spec(spec: Spec, unreduced: Axes = ()) -> PartitionSpec:
    """The PartitionSpec that says the same, sums over `unreduced` axes still to come."""
    entries = (None if not d else d[0] if len(d) == 1 else d for d in spec)
    return PartitionSpec(*entries, unreduced=frozenset(unreduced))


def axes_in(spec: Iterable[Axes]) -> Axes:
    """All axes that `spec` names, in order."""
    return tuple(a for axes in spec for a in axes)


def only(spec: Spec, axes: Iterable[str]) -> Spec:
    """`spec` without the axes that are not in `axes`."""
    keep = frozenset(axes)
    return tuple(tuple(a for a in d if a in keep) for d in spec)


def shards(axes: Axes, sizes: Sizes) -> int:
    """How many parts `axes` cut a dim into."""
    return prod(sizes[a] for a in axes)


def fit(axes: Axes, size: int, sizes: Sizes, unit: int = 1) -> Axes:
    """The longest prefix of `axes` that cuts `size` into equal parts, each a multiple of `unit`.

    A dim that does not divide arrives padded, and a sum over padding is silently wrong: such axes
    are gathered instead. `unit` is the block that one scale covers.
    """
    parts, kept = 1, []
    for axis in axes:
        parts *= sizes[axis]
        if size % (parts * unit):
            break
        kept.append(axis)
    return tuple(kept)


def cut_before(axes: Axes, lost: Iterable[str]) -> Axes:
    """`axes` up to the first that is in `lost`: minor axes alone would mean other rows."""
    gone = frozenset(lost)
    for i, axis in enumerate(axes):
        if axis in gone:
            return axes[:i]
    return axes


def common_prefix(a: Axes, b: Axes) -> Axes:
    """The axes that both start with."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def local_shape(shape: Sequence[int], spec: Spec, sizes: Sizes) -> tuple[int, ...]:
    """The shape of one device's shard. `spec` divides `shape`."""
    return tuple(n // shards(d, sizes) for n, d in zip(shape, spec, strict=True))


def even(shape: Sequence[int], spec: Spec, sizes: Sizes) -> Spec:
    """`spec` as far as it cuts dims into equal parts."""
    return tuple(fit(d, n, sizes) for d, n in zip(spec, shape, strict=True))


def divisible(shape: Sequence[int], spec: Spec, axis_sizes: Iterable[tuple[str, int]]) -> Spec:
    """`even`, without axes of one device."""
    sizes = {a: n for a, n in axis_sizes if n > 1}
    return even(shape, only(spec, sizes), sizes)


def among(axes: Iterable[str], axis_sizes: AxisSizes) -> Axes:
    """Those of `axes` that have more than one device, in the order of the mesh."""
    asked = frozenset(axes)
    return tuple(a for a, n in axis_sizes if a in asked and n > 1)
