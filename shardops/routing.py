"""How an op gets onto the mesh: four routes, read off the operands' types. Knows JAX's modes alone.

| axes of the mesh                | route                                                          |
|---------------------------------|----------------------------------------------------------------|
| none, or all manual             | the local op as it is                                          |
| Explicit                        | plan from the types, reshard operands, shard_map               |
| Auto                            | custom_partitioning: plan when the partitioner offers layouts  |
| Explicit and Auto               | shard_map over the Explicit axes, custom_partitioning inside   |

Order of wrapping: match_varying -> custom_vjp (the op's) -> custom_vmap -> route.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, NamedSharding

from shardops.op import Arrays, Op, Wanted, bare
from shardops.routing_auto import run_auto
from shardops.rules.reduction import Reduction
from shardops.rules.spec import Spec, only, to_partition_spec, to_spec


def run(op: Op, arrays: Arrays, wanted: Wanted) -> tuple[jax.Array, ...]:
    """Run `op` on the route that the operands' types ask for."""
    return _batchable(op, wanted)(*match_varying(*arrays))


@lru_cache(maxsize=4096)
def _batchable(op: Op, wanted: Wanted) -> Callable[..., tuple[jax.Array, ...]]:
    @custom_vmap
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with jax.named_scope(op.scope):
            return _route(op, arrays, wanted)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> Any:
        results = op.vmapped(size, batched, arrays, wanted)
        return results, tuple(True for _ in results)

    return call


def _route(op: Op, arrays: Arrays, wanted: Wanted) -> tuple[jax.Array, ...]:
    mesh = mesh_of(*arrays)
    if mesh.explicit_axes:
        return _explicit(op, arrays, wanted, mesh)
    # Without a mesh in the types, shardings may still arrive with the arguments of a jit.
    unknown = mesh.empty and jax.device_count() > 1
    if unknown or any(mesh.shape[a] > 1 for a in mesh.auto_axes):
        return run_auto(op, arrays)
    return bare(op, *arrays)


def mesh_of(*arrays: jax.Array) -> AbstractMesh:
    """The mesh of the operands' types, else the ambient one."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def match_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Make all operands vary over the manual axes that any varies over.

    The derivative of that cast sums the cotangent of an operand that was the same on all devices.
    """
    varying = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(a, tuple(sorted(union - v)), to="varying") if union - v else a
        for a, v in zip(arrays, varying, strict=True)
    )


def reduce(x: jax.Array, reduction: Reduction) -> jax.Array:
    """Carry out the sums over the mesh."""
    for dim, axes in reduction.scatter:
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(x, reduction.all_reduce) if reduction.all_reduce else x


# ---- Explicit axes -------------------------------------------------------------------------------


def explicit_spec(array: jax.Array) -> Spec | None:
    """The sharding that the type of `array` states, None where it states none."""
    mesh = jax.typeof(array).sharding.mesh
    return type_spec(array) if mesh.explicit_axes else None


def type_spec(array: jax.Array) -> Spec:
    """The spec in the type of `array`."""
    partition = jax.typeof(array).sharding.spec
    pending = {*partition.unreduced, *partition.reduced}
    if pending:
        raise NotImplementedError(
            f"shardops: an operand of shape {array.shape} has type {partition}; expected no "
            "reduced or unreduced axes. Deferred reduction is coming: until then reshard the "
            "operand to a spec without them."
        )
    return to_spec(partition, array.ndim)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Type:
    """What a cotangent must look like: dtype and, on an Explicit mesh, sharding of its primal."""

    dtype: Any
    spec: Spec | None
    mesh: AbstractMesh

    @classmethod
    def of(cls, array: jax.Array) -> "Type":
        aval = jax.typeof(array)
        return cls(aval.dtype, explicit_spec(array), aval.sharding.mesh)

    def apply(self, array: jax.Array) -> jax.Array:
        """`array`, cast and, where it lies elsewhere, resharded."""
        array = array.astype(self.dtype)
        if self.spec is None or explicit_spec(array) == self.spec:
            return array
        return jax.sharding.reshard(array, NamedSharding(self.mesh, to_partition_spec(self.spec)))


def constrain(array: jax.Array, wanted: Spec) -> jax.Array:
    """`array` sharded as `wanted`, whose axes are Explicit or Auto ones of its mesh."""
    mesh = mesh_of(array)
    if mesh.explicit_axes:
        partition = to_partition_spec(only(wanted, mesh.explicit_axes))
        array = jax.sharding.reshard(array, NamedSharding(mesh, partition))
    if mesh.auto_axes:
        partition = to_partition_spec(only(wanted, mesh.auto_axes))
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, partition))
    return array


def _explicit(op: Op, arrays: Arrays, wanted: Wanted, mesh: AbstractMesh) -> tuple[jax.Array, ...]:
    axes = mesh.explicit_axes
    specs = tuple(only(type_spec(a), axes) for a in arrays)
    known = tuple(None if w is None else only(w, axes) for w in wanted)
    sizes = tuple((a, mesh.shape[a]) for a in axes)
    placement = op.place(tuple(a.shape for a in arrays), specs, sizes, known)

    def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
        def inner(inner_op: Op, *operands: jax.Array) -> tuple[jax.Array, ...]:
            return _route(inner_op, match_varying(*operands), ())

        with jax.named_scope(op.scope):
            return op.local(placement.plan, shards, inner)

    in_specs = tuple(to_partition_spec(s) for s in placement.operands)
    moved = [
        jax.sharding.reshard(a, NamedSharding(mesh, s))
        for a, s in zip(arrays, in_specs, strict=True)
    ]
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=tuple(to_partition_spec(s) for s in placement.results),
        axis_names=set(axes),
    )
    return mapped(*moved)
