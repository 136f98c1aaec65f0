"""Steps of a plan on the shards of one device, as explicit collectives."""

from collections.abc import Iterable, Mapping

import jax

from shardops.rules.spec import Axes, Spec, shards
from shardops.rules.step import Step


def carry_out(x: jax.Array, steps: Iterable[Step]) -> jax.Array:
    """Take one device's shard from where the first step begins to where the last one ends."""
    for step in steps:
        x = _carry_out(x, step)
    return x


def _carry_out(x: jax.Array, step: Step) -> jax.Array:
    axes = step.axes
    match step.kind:
        case "slice":
            length = x.shape[step.dim] // jax.lax.axis_size(axes)
            start = jax.lax.axis_index(axes) * length
            return jax.lax.dynamic_slice_in_dim(x, start, length, step.dim)
        case "all_gather":
            # Where types say over which axes an array varies, what is gathered no longer does.
            varies = set(axes) <= jax.typeof(x).manual_axis_type.varying
            to = "invarying" if varies else "varying"
            return jax.lax.all_gather(x, axes, axis=step.dim, tiled=True, to=to)
        case "all_to_all":
            return jax.lax.all_to_all(
                x, axes, split_axis=step.to_dim, concat_axis=step.dim, tiled=True
            )
        case "ppermute":
            sizes = {a: jax.lax.axis_size(a) for a in axes}
            return jax.lax.ppermute(x, axes, permutation(step.before, step.after, axes, sizes))
        case "psum":
            return jax.lax.psum(x, axes)
        case "psum_scatter":
            return jax.lax.psum_scatter(x, axes, scatter_dimension=step.dim, tiled=True)


def permutation(
    before: Spec, after: Spec, axes: Axes, sizes: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(source, destination) pairs, devices numbered along `axes`, major to minor.

    Each shard is held by as many devices as need it: those that need what they hold keep it, the
    others are paired in order.
    """
    held: dict[tuple[int, ...], list[int]] = {}
    needed: dict[tuple[int, ...], list[int]] = {}
    for device in range(shards(axes, sizes)):
        at = _coordinates(device, axes, sizes)
        has, needs = _part(before, at, sizes), _part(after, at, sizes)
        if has == needs:
            held.setdefault(has, []).insert(0, device)
            needed.setdefault(has, []).insert(0, device)
        else:
            held.setdefault(has, []).append(device)
            needed.setdefault(needs, []).append(device)
    return [
        pair for part, sources in held.items() for pair in zip(sources, needed[part], strict=True)
    ]


def _coordinates(device: int, axes: Axes, sizes: Mapping[str, int]) -> dict[str, int]:
    at = {}
    for axis in reversed(axes):
        device, at[axis] = divmod(device, sizes[axis])
    return at


def _part(spec: Spec, at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Which part of each dim lies on the device at these coordinates, as far as they go."""
    part = []
    for dim in spec:
        index = 0
        for axis in dim:
            if axis in at:
                index = index * sizes[axis] + at[axis]
        part.append(index)
    return tuple(part)
