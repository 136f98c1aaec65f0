"""What a plan moves: bytes that a device receives, under ring algorithms."""

from collections.abc import Sequence
from math import prod

from shardops.rules.reduction import Reduction
from shardops.rules.spec import Sizes, Spec, common_prefix, local_shape, shards


def moved_bytes(
    shape: Sequence[int], have: Spec, want: Spec, sizes: Sizes, itemsize: int = 1
) -> float:
    """Bytes a device receives where an array goes from one sharding to another.

    What it holds already of what it needs stays: all of it where dims are only cut further.
    """
    held = 1.0
    for a, b in zip(have, want, strict=True):
        if a != b[: len(a)]:
            held /= shards(a[len(common_prefix(a, b)) :], sizes)
    return itemsize * prod(local_shape(shape, want, sizes)) * (1 - held)


def reduced_bytes(
    shape: Sequence[int], partial: Spec, reduction: Reduction, sizes: Sizes, itemsize: int = 1
) -> float:
    """Bytes a device receives in the sums over the mesh: a reduce-scatter is half an all-reduce."""
    size, total = itemsize * prod(local_shape(shape, partial, sizes)), 0.0
    for _, axes in reduction.scatter:
        n = shards(axes, sizes)
        total += size * (n - 1) / n
        size /= n
    n = shards(reduction.all_reduce, sizes)
    return total + 2 * size * (n - 1) / n
