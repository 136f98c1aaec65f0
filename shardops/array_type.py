"""What the type of an array says about its sharding, and arrays brought to a type."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardops.maxima import is_traced
from shardops.rules.spec import Axes, Spec, axes_in, only, to_partition_spec, to_spec


def mesh_of(*arrays: jax.Array) -> AbstractMesh:
    """The mesh of the operands' types, else the ambient one."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def explicit_spec(array: jax.Array) -> Spec | None:
    """The sharding that the type of `array` states, None where it states none."""
    mesh = jax.typeof(array).sharding.mesh
    return type_spec(array) if mesh.explicit_axes else None


def type_spec(array: jax.Array) -> Spec:
    """The spec in the type of `array`."""
    refuse_deferred(f"shardops: an operand of shape {array.shape}", array)
    return to_spec(jax.typeof(array).sharding.spec, array.ndim)


def refuse_deferred(what: str, array: jax.Array) -> None:
    """Raise for an array that is still to be summed, or whose gradient would be where none can."""
    sharding = jax.typeof(array).sharding
    partition, mesh = sharding.spec, sharding.mesh
    if partition.unreduced:
        raise NotImplementedError(
            f"{what} has type {partition}; expected no unreduced axes. Sum it first: "
            "jax.sharding.reshard to a spec without them."
        )
    if partition.reduced and {*mesh.axis_names} - {*mesh.explicit_axes}:
        raise NotImplementedError(
            f"{what} has type {partition} on {mesh}; expected no reduced axes where not all axes "
            "are Explicit. JAX has unreduced arrays on meshes of Explicit axes alone: make the "
            "others Explicit, or reshard it."
        )


def deferred_axes(array: jax.Array) -> Axes:
    """Axes over which the cotangent of `array` is to stay unreduced: its type is reduced there."""
    sharding = jax.typeof(array).sharding
    return tuple(a for a in sharding.mesh.axis_names if a in sharding.spec.reduced)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Type:
    """What a cotangent must look like: dtype and, on an Explicit mesh, sharding of its primal."""

    dtype: Any
    spec: Spec | None
    unreduced: Axes  # axes over which its sum is deferred
    mesh: AbstractMesh

    @classmethod
    def of(cls, array: jax.Array) -> "Type":
        aval = jax.typeof(array)
        return cls(aval.dtype, explicit_spec(array), deferred_axes(array), aval.sharding.mesh)

    def apply(self, array: jax.Array) -> jax.Array:
        """`array`, cast and, where it lies elsewhere, resharded."""
        array = array.astype(self.dtype)
        if self.spec is None:
            return array
        return resharded(array, self.mesh, self.spec, self.unreduced)


def constrain(
    array: jax.Array,
    wanted: Spec,
    open_dims: frozenset[int] = frozenset(),
    unreduced: Axes = (),
) -> jax.Array:
    """`array` sharded as `wanted`, whose axes are Explicit or Auto ones of its mesh.

    On a mesh of both kinds a spec without Auto axes, such as a type's, leaves those open; so do
    `open_dims`.
    """
    mesh = mesh_of(array)
    if mesh.explicit_axes:
        array = resharded(array, mesh, only(wanted, mesh.explicit_axes), unreduced)
    auto = only(wanted, mesh.auto_axes)
    if any(auto) or (mesh.auto_axes and not mesh.explicit_axes):
        entries = list(to_partition_spec(auto))
        for dim in open_dims:
            entries[dim] = PartitionSpec.UNCONSTRAINED
        sharding = NamedSharding(mesh, PartitionSpec(*entries))
        eager = mesh.explicit_axes and not is_traced()
        asked = _constrained if eager else jax.lax.with_sharding_constraint
        array = asked(array, sharding)
    return array


@partial(jax.jit, static_argnums=1)
def _constrained(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """On Auto axes beside Explicit ones: a constraint that is not traced takes these away."""
    return jax.lax.with_sharding_constraint(array, sharding)


def laid_out(array: jax.Array, spec: Spec) -> jax.Array:
    """`array` resharded to `spec` on Explicit axes; as it is on others."""
    return array if explicit_spec(array) is None else resharded(array, mesh_of(array), spec)


def beside(array: jax.Array, term: jax.Array | None) -> jax.Array | None:
    """A term to be added to `array`, of as many dims, laid out as that is on Explicit axes; along a
    first dim that the term brings, as it is itself."""
    spec = explicit_spec(array)
    own = None if term is None else explicit_spec(term)
    if term is None or spec is None or own is None:
        return term
    first = spec[0] if array.shape[0] > 1 else tuple(a for a in own[0] if a not in axes_in(spec))
    there = zip(term.shape, (first, *spec[1:]), strict=True)
    return laid_out(term, tuple(() if n == 1 else axes for n, axes in there))


def resharded(array: jax.Array, mesh: AbstractMesh, spec: Spec, unreduced: Axes = ()) -> jax.Array:
    now = jax.typeof(array).sharding.spec
    lies = explicit_spec(array) == spec if not now.unreduced else to_spec(now, array.ndim) == spec
    if lies and now.unreduced == {*unreduced} and not now.reduced:
        return array
    partition = to_partition_spec(spec, unreduced)
    return jax.sharding.reshard(array, NamedSharding(mesh, partition))
