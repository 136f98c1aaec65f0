"""How an op gets onto the mesh: four routes, read off the operands' types. Knows JAX's modes alone.

| axes of the mesh                | route                                                          |
|---------------------------------|----------------------------------------------------------------|
| none, or all manual             | the local op as it is                                          |
| Explicit                        | plan from the types, shard_map that moves as planned           |
| Auto                            | custom_partitioning: plan when the partitioner offers layouts  |
| Explicit and Auto               | shard_map over the Explicit axes, custom_partitioning inside   |

Order of wrapping: match_varying -> custom_vjp (the op's) -> custom_vmap -> route.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh

from shardops import array_type
from shardops.moving import vary
from shardops.op import Arrays, Op, Placement, Shapes, Wanted, bare, compiled
from shardops.placing import arrive, placed
from shardops.recording import Record, record, token
from shardops.routing_auto import run_auto
from shardops.rules.spec import Axes, Spec, only, to_partition_spec


def run(op: Op, arrays: Arrays, wanted: Wanted) -> tuple[jax.Array, ...]:
    """Run `op` on the route that the operands' types ask for."""
    return _compiled_run(op, wanted, *arrays)


def _run(op: Op, wanted: Wanted, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return _batchable(op, wanted)(*match_varying(*arrays))


# Eagerly, as in the backward pass of an eager gradient, a shard_map over some of the axes is more
# than JAX 0.10 can do, and slow.
_compiled_run = compiled(_run)


@lru_cache(maxsize=4096)
def _batchable(op: Op, wanted: Wanted) -> Callable[..., tuple[jax.Array, ...]]:
    @custom_vmap
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with jax.named_scope(op.scope):
            return _route(op, arrays, wanted)

    @call.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: jax.Array) -> Any:
        results = op.vmapped(size, batched, arrays, wanted)
        results = _typed_as_traced(op, batched, arrays, wanted, results)
        return results, tuple(True for _ in results)

    vars(rule)["op"] = op  # by which `explain` finds the op in a program
    return call


def _typed_as_traced(
    op: Op, batched: Sequence[bool], arrays: Arrays, wanted: Wanted, results: Arrays
) -> tuple[jax.Array, ...]:
    """Results of the op under vmap, with the sharding that the op without it was traced to have."""
    mesh = array_type.mesh_of(*arrays)
    if not _explicit_axes(mesh):
        return tuple(results)
    specs = [array_type.type_spec(a) for a in arrays]
    new = max((s[0] for s, b in zip(specs, batched, strict=True) if b), key=len)
    axes = tuple(a for a in _explicit_axes(mesh) if a not in new)
    shapes = tuple(a.shape[b:] for a, b in zip(arrays, batched, strict=True))
    inner = tuple(s[b:] for s, b in zip(specs, batched, strict=True))
    itemsizes = tuple(a.dtype.itemsize for a in arrays)
    placement = _place_on(op, shapes, inner, wanted, mesh, axes, itemsizes)
    return tuple(
        array_type.laid_out(r, (new, *spec))
        for r, spec in zip(results, placement.results, strict=True)
    )


def _route(op: Op, arrays: Arrays, wanted: Wanted) -> tuple[jax.Array, ...]:
    mesh = array_type.mesh_of(*arrays)
    explicit = _explicit_axes(mesh)
    if explicit:
        return _explicit(op, arrays, wanted, mesh, explicit)
    return _on_other_axes(op, arrays, mesh)


def _on_other_axes(op: Op, arrays: Arrays, mesh: AbstractMesh) -> tuple[jax.Array, ...]:
    # Without a mesh in the types, shardings may still arrive with the arguments of a jit.
    unknown = mesh.empty and jax.device_count() > 1
    if unknown or not any(mesh.shape[a] > 1 for a in mesh.axis_names):
        _record_alone(op, arrays)
    if unknown or any(mesh.shape[a] > 1 for a in mesh.auto_axes):
        return run_auto(op, arrays)
    return bare(op, *arrays)


def match_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Make all operands vary over the manual axes that any varies over.

    The derivative of that cast sums the cotangent of an operand that was the same on all devices.
    """
    return _varying_like(arrays, arrays)


def _varying_like(arrays: Arrays, others: Arrays) -> tuple[jax.Array, ...]:
    """`others`, varying over the manual axes that any of `arrays` varies over."""
    union = frozenset[str]().union(*map(_varying, arrays))
    missing = (tuple(sorted(union - _varying(a))) for a in others)
    return tuple(vary(a, axes) if axes else a for a, axes in zip(others, missing, strict=True))


def _varying(array: jax.Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def pull(function: Callable[..., Any], primals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """Cotangents of `primals`, for those of the results of `function`.

    The results of `function` may be laid out otherwise than those that the cotangents belong to.
    """
    results, pull_back = jax.vjp(function, *primals)
    typed = (array_type.Type.of(r).apply(c) for r, c in zip(results, cotangents, strict=True))
    return pull_back(tuple(typed))


# ---- Explicit axes -------------------------------------------------------------------------------


def _explicit(
    op: Op, arrays: Arrays, wanted: Wanted, mesh: AbstractMesh, axes: Axes
) -> tuple[jax.Array, ...]:
    _refuse_unsorted(op, mesh, axes)
    # An axis of one device moves nothing, but a sum over it would still compile to a collective:
    # such axes stay out of the work, and come back in the types of the results.
    typed = _place(op, arrays, wanted, mesh, axes)
    # An operand of no elements stays out of a shard_map, which loses it while lowering.
    empty = any(a.size == 0 for a in arrays)
    working_axes = () if empty else tuple(a for a in axes if mesh.shape[a] > 1)
    working = _place(op, arrays, wanted, mesh, working_axes)
    if working_axes:
        _record(op, arrays, wanted, mesh, working_axes, working)
    plain = [array_type.resharded(a, mesh, s) for a, s in zip(arrays, working.taken, strict=True)]

    deferred = working.unreduced or ((),) * len(working.results)

    def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
        with jax.named_scope(op.scope):
            results = op.local(working.plan, arrive(op, shards, working), _inside)
        return tuple(
            jax.lax.pcast(r, axes, to="unreduced") if axes else r
            for r, axes in zip(results, deferred, strict=True)
        )

    if working_axes:
        results = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(to_partition_spec(s) for s in working.taken),
            out_specs=tuple(map(to_partition_spec, working.results, deferred)),
            axis_names=set(axes),
            # What a permute leaves on fewer axes is the same along the others, which types of
            # varying arrays cannot say. Open sums need these types.
            check_vma=any(deferred),
        )(*plain)
        results = _varying_like(arrays, results)
    else:
        results = _on_other_axes(op, plain, mesh)
    return tuple(
        array_type.resharded(r, mesh, spec, axes)
        for r, spec, axes in zip(results, typed.results, deferred, strict=True)
    )


def _refuse_unsorted(op: Op, mesh: AbstractMesh, axes: Axes) -> None:
    """Refuse a nested shard_map that XLA would end the process for."""
    names = mesh.axis_names
    if not any(mesh.shape[a] > 1 for a in mesh.auto_axes):
        return
    for manual in mesh.manual_axes:
        before = [a for a in axes if names.index(a) < names.index(manual)]
        if before:
            raise NotImplementedError(
                f"{op.scope}: mesh is {dict(mesh.shape)} inside a shard_map over {manual!r}; "
                f"expected its manual axes before the Explicit ones {before} where Auto axes are "
                f"left: XLA cannot compile others. Put {manual!r} first in the mesh, or map "
                f"{before} too."
            )


def _place(op: Op, arrays: Arrays, wanted: Wanted, mesh: AbstractMesh, axes: Axes) -> Placement:
    """The plan as far as `axes` go, from the types of the operands."""
    shapes = tuple(a.shape for a in arrays)
    itemsizes = tuple(a.dtype.itemsize for a in arrays)
    return _place_on(
        op, shapes, tuple(map(array_type.type_spec, arrays)), wanted, mesh, axes, itemsizes
    )


def _place_on(
    op: Op,
    shapes: Shapes,
    specs: tuple[Spec, ...],
    wanted: Wanted,
    mesh: AbstractMesh,
    axes: Axes,
    itemsizes: tuple[int, ...],
) -> Placement:
    return placed(
        op,
        shapes,
        tuple(only(s, axes) for s in specs),
        tuple((a, mesh.shape[a]) for a in axes),
        tuple(None if w is None else only(w, axes) for w in wanted),
        itemsizes,
    )


def _record(
    op: Op, arrays: Arrays, wanted: Wanted, mesh: AbstractMesh, axes: Axes, placement: Placement
) -> None:
    entry = Record(
        op,
        "explicit",
        tuple(a.shape for a in arrays),
        tuple(a.dtype.name for a in arrays),
        tuple(only(array_type.type_spec(a), axes) for a in arrays),
        tuple(None if w is None else only(w, axes) for w in wanted),
        tuple((a, mesh.shape[a]) for a in axes),
        placement,
    )
    record(token(), entry)


def _record_alone(op: Op, arrays: Arrays) -> None:
    """Of an op on one device, as far as the types tell."""
    listener = token()
    if listener is None:
        return
    shapes = tuple(a.shape for a in arrays)
    whole: tuple[Spec, ...] = tuple(((),) * len(shape) for shape in shapes)
    placement = placed(op, shapes, whole, (), (), tuple(a.dtype.itemsize for a in arrays))
    dtypes = tuple(a.dtype.name for a in arrays)
    record(listener, Record(op, "alone", shapes, dtypes, whole, (), (), placement))


def _inside(op: Op, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The op on what a shard_map over the Explicit axes leaves to each device."""
    matched = match_varying(*arrays)
    return _on_other_axes(op, matched, array_type.mesh_of(*matched))


def _explicit_axes(mesh: AbstractMesh) -> Axes:
    """The Explicit axes that a shard_map may map here: not those that an enclosing vmap maps."""
    # Private: there is no public way to ask. Such an axis shards the batch dim, unseen in here.
    from jax._src.core import get_axis_env

    taken = get_axis_env().explicit_mesh_axis_names
    return tuple(a for a in mesh.explicit_axes if a not in taken)
