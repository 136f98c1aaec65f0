"""Operands gathered once for several products, on Explicit axes, whose types say where they lie."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardops import array_type
from shardops.checkpoint_policies import GATHERED
from shardops.errors import shown, wrong
from shardops.layers.names import named_data
from shardops.layers.operands import Both
from shardops.primitives import check
from shardops.primitives.scaled import ScaledArray
from shardops.rules.scales import scale_spec
from shardops.rules.spec import Spec, to_partition_spec


def check_input_sharding(op: str, x: jax.Array, spec: Any) -> None:
    """Refuse an `input_sharding` on a mesh where a saved value lies as the partitioner likes."""
    mesh = array_type.mesh_of(x)
    if not isinstance(spec, PartitionSpec) or {*mesh.axis_names} - {*mesh.explicit_axes}:
        want = "a PartitionSpec, on a mesh of Explicit axes alone"
        fix = "Leave it out: the product gathers its operands itself."
        raise ValueError(wrong(op, "input_sharding", f"{shown(spec)} on {mesh}", want, fix))
    if mesh.empty:
        want, fix = "None where there is no mesh", "Set one with jax.set_mesh, or leave it out."
        raise ValueError(wrong(op, "input_sharding", shown(spec), want, fix))
    have = array_type.type_spec(x)
    wanted = check.out_sharding(op, spec, x.shape, mesh, "input_sharding")
    if wanted is None or any(a[: len(b)] != b for a, b in zip(have, wanted, strict=True)):
        want = f"leading axes of each dim of {to_partition_spec(have)}, or none"
        fix = "It is gathered, and moved nowhere else: reshard x first."
        raise ValueError(wrong(op, "input_sharding", shown(spec), want, fix))


def gathered(x: Both, spec: Spec) -> Both:
    """Both layouts of x [*rows, h], where `spec` says; named for `save_gathered`."""
    rows = named_data(_at(x.rows, spec), GATHERED)
    if rows.block is None:
        return Both(rows, _transposed(rows), x.amax)
    columns = _at(x.columns, (spec[-1], *spec[:-1]))
    return Both(rows, named_data(columns, GATHERED), x.amax)


def _at(part: ScaledArray, spec: Spec) -> ScaledArray:
    """The 8-bit data resharded, and the scales of blocks along with them."""
    assert part.data is not None
    data = array_type.laid_out(part.data, spec)
    scale_inv = part.scale_inv
    if part.block is not None and scale_inv is not None:
        sizes = array_type.mesh_of(data).shape
        lies = scale_spec(part.shape, spec, part.block, sizes)
        scale_inv = array_type.laid_out(scale_inv, lies)
    return replace(part, data=data, scale_inv=scale_inv)


def _transposed(rows: ScaledArray) -> ScaledArray:
    assert rows.data is not None
    return replace(rows, data=jnp.moveaxis(rows.data, -1, 0))
