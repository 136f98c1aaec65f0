"""Steps of a plan on the shards of one device, as explicit collectives."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from shardops.rules.parts import axis_of, coordinate, parts_of, size_of
from shardops.rules.spec import Axes, Spec, axes_in
from shardops.rules.step import Step


def carry_out(x: jax.Array, steps: Iterable[Step]) -> jax.Array:
    """Take one device's shard from where the first step begins to where the last one ends."""
    for step in steps:
        x = _carry_out(x, step)
    return x


def _carry_out(x: jax.Array, step: Step) -> jax.Array:
    axes, groups = _taking_part(step.axes)
    match step.kind:
        case "slice":
            length = x.shape[step.dim] // prod(_size(a) for a in step.axes)
            return jax.lax.dynamic_slice_in_dim(x, _index(step.axes) * length, length, step.dim)
        case "all_gather":
            # Where types say over which axes an array varies, what is gathered no longer does.
            varies = set(axes) <= jax.typeof(x).manual_axis_type.varying
            to = "invarying" if varies else "varying"
            return jax.lax.all_gather(
                x, axes, axis=step.dim, tiled=True, axis_index_groups=groups, to=to
            )
        case "all_to_all":
            return jax.lax.all_to_all(
                x,
                axes,
                split_axis=step.to_dim,
                concat_axis=step.dim,
                tiled=True,
                axis_index_groups=groups,
            )
        case "ppermute":
            axes = in_mesh_order(axes)
            sizes = {a: jax.lax.axis_size(a) for a in axes}
            pairs = permutation(step.before, step.after, axes, sizes)
            return _settled(jax.lax.ppermute(x, axes, pairs), step)
        case "psum":
            return _summed(x, lambda x: jax.lax.psum(x, axes, axis_index_groups=groups))
        case "psum_scatter":

            def scattered(x: jax.Array) -> jax.Array:
                return jax.lax.psum_scatter(
                    x, axes, scatter_dimension=step.dim, tiled=True, axis_index_groups=groups
                )

            return _summed(x, scattered)


def _summed(x: jax.Array, over_the_mesh: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A sum over the mesh; of 16-bit numbers in float32 where XLA on a CPU would end the process.

    It does in regions that are mapped in part, in plain JAX too. What it moves there is float32 in
    any case.
    """
    if not _ends_the_process(x):
        return over_the_mesh(x)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: over_the_mesh(x.astype(jnp.float32)).astype(x.dtype),
        default=over_the_mesh,
    )


def _ends_the_process(x: jax.Array) -> bool:
    """Whether a sum of x over the mesh would, on a CPU."""
    mesh = jax.sharding.get_abstract_mesh()
    return x.dtype.itemsize == 2 and 0 < len(mesh.manual_axes) < len(mesh.axis_names)


def vary(x: jax.Array, axes: Axes) -> jax.Array:
    """x as an array that varies over `axes`; its cotangent is summed over them."""
    if not _ends_the_process(x):
        return jax.lax.pcast(x, axes, to="varying")
    return _vary(axes, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vary(axes: Axes, x: jax.Array) -> jax.Array:
    return jax.lax.pcast(x, axes, to="varying")


def _vary_back(axes: Axes, saved: None, dx: jax.Array) -> tuple[jax.Array]:
    del saved
    return (_summed(dx, lambda x: jax.lax.psum(x, axes)),)


_vary.defvjp(lambda axes, x: (_vary(axes, x), None), _vary_back)


def _settled(x: jax.Array, step: Step) -> jax.Array:
    """What a permute left is the same along axes that shard it no longer; types do not see that.

    Only where they are checked, which they are for open sums: there a sum of one says so.
    """
    left = {*axes_in(step.before)} - {*axes_in(step.after)}
    axes = tuple(sorted(left & jax.typeof(x).manual_axis_type.varying))
    if not axes:
        return x
    first = jax.lax.axis_index(axes) == 0
    return jax.lax.psum(jnp.where(first, x, jnp.zeros_like(x)), axes)


# Where no mesh is set, as in the partitioner's callback: the axes of the one that is mapped.
_mapped: ContextVar[Axes | None] = ContextVar("axes of the mapped mesh", default=None)


@contextmanager
def mapped_over(axes: Axes) -> Iterator[None]:
    """What runs in here is mapped over a mesh of these axes, in their order."""
    before = _mapped.set(axes)
    try:
        yield
    finally:
        _mapped.reset(before)


def in_mesh_order(axes: Axes) -> Axes:
    """Axes in the order of the mesh that is mapped: a permute takes no other.

    JAX's own record of the axes in scope has no order: of two equal ones it keeps the first.
    """
    order = _mapped.get() or jax.sharding.get_abstract_mesh().axis_names
    return tuple(sorted(axes, key=order.index))


def _size(name: str) -> int:
    axis = axis_of(name)
    return size_of(name, {axis: jax.lax.axis_size(axis)})


def _index(names: Axes) -> jax.Array:
    """Where this device is along some axes or parts of axes, major to minor."""
    index = jnp.int32(0)
    for name in names:
        axis = axis_of(name)
        at = jax.lax.axis_index(axis)
        index = index * _size(name) + coordinate(name, at, {axis: jax.lax.axis_size(axis)})
    return index


def _taking_part(names: Axes) -> tuple[Axes, list[list[int]] | None]:
    """The mesh axes of a collective, and its groups of devices counted along them.

    No groups where whole axes take part: then all devices along them do.
    """
    axes = tuple(dict.fromkeys(map(axis_of, names)))
    if axes == names:
        return axes, None
    axes = in_mesh_order(axes)
    sizes = {a: jax.lax.axis_size(a) for a in axes}
    return axes, groups_of(names, sizes)


def groups_of(names: Axes, sizes: Mapping[str, int]) -> list[list[int]]:
    """Devices that differ along `names` only, in order, counted along the axes in `sizes`."""
    parts = (p for a, n in sizes.items() if a not in names for p in parts_of(a, n))
    others = [p for p in parts if p not in names]
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for device in range(prod(sizes.values())):
        at = _coordinates(device, sizes)
        same, order = (
            tuple(coordinate(n, at[axis_of(n)], sizes) for n in which) for which in (others, names)
        )
        groups.setdefault(same, []).append((order, device))
    return [[device for _, device in sorted(group)] for group in groups.values()]


def permutation(
    before: Spec, after: Spec, names: Axes, sizes: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(source, destination) pairs, devices numbered along the axes of `names`, major to minor.

    Each shard is held by as many devices as need it: those that need what they hold keep it, the
    others are paired in order.
    """
    axes = {a: sizes[a] for a in dict.fromkeys(map(axis_of, names))}
    held: dict[tuple[int, ...], list[int]] = {}
    needed: dict[tuple[int, ...], list[int]] = {}
    for device in range(prod(axes.values())):
        at = _coordinates(device, axes)
        has, needs = _part(before, at, axes), _part(after, at, axes)
        if has == needs:
            held.setdefault(has, []).insert(0, device)
            needed.setdefault(has, []).insert(0, device)
        else:
            held.setdefault(has, []).append(device)
            needed.setdefault(needs, []).append(device)
    return [
        pair for part, sources in held.items() for pair in zip(sources, needed[part], strict=True)
    ]


def _coordinates(device: int, sizes: Mapping[str, int]) -> dict[str, int]:
    at = {}
    for axis in reversed(tuple(sizes)):
        device, at[axis] = divmod(device, sizes[axis])
    return at


def _part(spec: Spec, at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Which part of each dim lies on the device at these coordinates, as far as they go."""
    part = []
    for dim in spec:
        index = 0
        for name in dim:
            axis = axis_of(name)
            if axis in at:
                index = index * size_of(name, sizes) + coordinate(name, at[axis], sizes)
        part.append(index)
    return tuple(part)
