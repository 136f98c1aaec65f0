"""Where a sum over mesh axes ends: on every device, or scattered over a dim of the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardops.rules.spec import Axes, Sizes, Spec, fit, local_shape, shards
from shardops.rules.step import Step


@dataclass(frozen=True)
class Reduction:
    """The collectives that turn local partial sums into the result: first `scatter`, then the rest.

    Scattering first leaves less to all-reduce.
    """

    scatter: tuple[tuple[int, Axes], ...] = ()  # (result dim, axes): tiled psum_scatter
    all_reduce: Axes = ()  # one psum over all of them

    def __bool__(self) -> bool:
        return bool(self.scatter or self.all_reduce)

    @property
    def axes(self) -> Axes:
        return tuple(a for _, axes in self.scatter for a in axes) + self.all_reduce


def place_reduction(
    axes: Axes, partial: Spec, shape: Sequence[int], sizes: Sizes, wanted: Spec | None
) -> tuple[Reduction, Spec]:
    """Scatter over the dims where `wanted` asks for the reduced axes, all-reduce the others.

    An axis is scattered onto a dim only as the minor part of what shards the dim already, and only
    in equal parts.

    Returns: the reduction, and the spec of the result after it.
    """
    left = list(axes)
    scatter: list[tuple[int, Axes]] = []
    final = list(partial)
    for dim, want in enumerate(wanted or ()):
        have = final[dim]
        if want[: len(have)] != have:
            continue
        tail: list[str] = []
        for axis in want[len(have) :]:
            if axis not in left:
                break
            tail.append(axis)
        fitting = fit(tuple(tail), shape[dim] // shards(have, sizes), sizes)
        if fitting:
            scatter.append((dim, fitting))
            final[dim] = have + fitting
            left = [a for a in left if a not in fitting]
    return Reduction(tuple(scatter), tuple(left)), tuple(final)


def reduction_steps(
    shape: Sequence[int],
    partial: Spec,
    reduction: Reduction,
    sizes: Sizes,
    itemsize: float,
    array: str,
) -> tuple[Step, ...]:
    """The sums over the mesh as steps: a reduce-scatter is half an all-reduce."""
    size, now, steps = itemsize * prod(local_shape(shape, partial, sizes)), partial, []
    for dim, axes in reduction.scatter:
        n, before = shards(axes, sizes), now
        now = (*now[:dim], now[dim] + axes, *now[dim + 1 :])
        steps.append(Step("psum_scatter", axes, before, now, size * (n - 1) / n, array, dim))
        size /= n
    if reduction.all_reduce:
        n = shards(reduction.all_reduce, sizes)
        received = 2 * size * (n - 1) / n
        steps.append(Step("psum", reduction.all_reduce, now, now, received, array))
    return tuple(steps)
