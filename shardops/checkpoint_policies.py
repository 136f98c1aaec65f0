"""Policies for `jax.checkpoint`, and the named values that they save.

By default an op gathers a sharded weight in its forward pass and again in its backward pass, so
that no device holds the whole weight in between. `gather` makes the whole weight a value of its
own, which both passes share; inside `jax.checkpoint` it is gathered again in the backward pass
unless the policy is `save_gathered`.

    @functools.partial(jax.checkpoint, policy=so.checkpoint_policies.save_gathered)
    def layer(w, x):
        w = so.checkpoint_policies.gather(w, P(None, "tp"))
        return so.gemm(x, w)
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec

from shardops import array_type
from shardops.errors import shown, wrong
from shardops.primitives import check
from shardops.primitives.quantize import QUANTIZED
from shardops.rules.spec import Spec, to_partition_spec

__all__ = [
    "gather",
    "save_gathered",
    "save_gemms",
    "save_gemms_without_batch_dims",
    "save_norms",
    "save_quantized",
]

GATHERED = "shardops.gathered"
GEMM = "shardops.gemm"  # a layer's product, before its activation
NORM = "shardops.norm"  # what a layer's norm gives, quantised or not

_named = jax.checkpoint_policies.save_only_these_names
_either = jax.checkpoint_policies.save_from_both_policies
_jax = jax.checkpoint_policies

save_gathered = _named(GATHERED)
save_gemms = _either(_jax.dots_saveable, _named(GEMM))
save_gemms_without_batch_dims = _either(_jax.dots_with_no_batch_dims_saveable, _named(GEMM))
save_norms = _named(NORM)
save_quantized = _named(QUANTIZED)


def gather(w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Gather an array once, for the forward and the backward pass.

    Args:
      w: any shape, on a mesh of Explicit axes alone.
      spec: the sharding of the result: of each dim of w the leading axes, or none.
    Returns: w, sharded as `spec`; the value is named for `save_gathered`. Its type is `reduced`
      over the axes that it was gathered over.
    Raises: ValueError where `spec` does not fit, or the mesh has other axes.
    Sharding: one all-gather. The cotangent goes back by one reduce-scatter.
    """
    (w,) = check.arrays("gather", w=w)
    mesh = array_type.mesh_of(w)
    wanted = check.out_sharding("gather", spec, w.shape, mesh)
    if wanted is None or mesh.empty or {*mesh.axis_names} - {*mesh.explicit_axes}:
        want = "a PartitionSpec, on a mesh of Explicit axes alone"
        fix = "On Auto axes the partitioner decides where a saved value lies."
        raise ValueError(wrong("gather", "spec", f"{shown(spec)} on {mesh}", want, fix))
    return checkpoint_name(_gathered(mesh, array_type.type_spec(w), wanted, w), GATHERED)


def _gathered(mesh: AbstractMesh, have: Spec, wanted: Spec, w: jax.Array) -> jax.Array:
    """Gathers to a reduced type: the derivative of that is a reduce-scatter of an open sum."""
    lost = [a[len(b) :] if a[: len(b)] == b else None for a, b in zip(have, wanted, strict=True)]
    if None in lost:
        want = f"leading axes of each dim of {to_partition_spec(have)}"
        raise ValueError(wrong("gather", "spec", str(wanted), want, "Reshard w first."))

    def body(shard: jax.Array) -> jax.Array:
        for dim, axes in enumerate(lost):
            if axes:
                shard = jax.lax.all_gather(shard, axes, axis=dim, tiled=True, to="reduced")
        return shard

    before = frozenset(array_type.deferred_axes(w))
    reduced = before.union(*(axes for axes in lost if axes))
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=PartitionSpec(*to_partition_spec(have), reduced=before),
        out_specs=PartitionSpec(*to_partition_spec(wanted), reduced=reduced),
    )(w)
