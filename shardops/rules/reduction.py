"""Where a sum over mesh axes ends: on every device, or scattered over a dim of the result."""

from collections.abc import Sequence
from math import prod

from shardops.rules.spec import Axes, Sizes, Spec, fit, local_shape, shards
from shardops.rules.step import Step


def sum_steps(
    shape: Sequence[int],
    partial: Spec,
    axes: Axes,
    wanted: Spec,
    sizes: Sizes,
    itemsize: float,
    array: str,
) -> tuple[Step, ...]:
    """Sums over `axes`, scattered over the dims where `wanted` has them; then one of all others.

    An axis is scattered onto a dim only as the minor part of what shards the dim already, and only
    in equal parts. Scattering first leaves less to all-reduce: a reduce-scatter is half of one.
    """
    size, now, left = itemsize * prod(local_shape(shape, partial, sizes)), partial, axes
    steps: list[Step] = []
    for dim, want in enumerate(wanted):
        have = now[dim]
        if want[: len(have)] != have:
            continue
        tail = want[len(have) :]
        reach = next((n for n, axis in enumerate(tail) if axis not in left), len(tail))
        scattered = fit(tail[:reach], shape[dim] // shards(have, sizes), sizes)
        if scattered:
            n, before = shards(scattered, sizes), now
            now = (*now[:dim], have + scattered, *now[dim + 1 :])
            received = size * (n - 1) / n
            steps.append(Step("psum_scatter", scattered, before, now, received, array, dim))
            left, size = tuple(a for a in left if a not in scattered), size / n
    if left:
        n = shards(left, sizes)
        steps.append(Step("psum", left, now, now, 2 * size * (n - 1) / n, array))
    return tuple(steps)
