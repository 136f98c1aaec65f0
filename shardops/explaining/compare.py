"""What XLA alone would move for a product: plain `dot_general`, compiled with the same specs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardops import _hlo_text as hlo_text
from shardops import hlo
from shardops.op import AxisSizes, Shapes
from shardops.primitives.gemm_op import GemmOp
from shardops.recording import Record
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.spec import Spec, to_partition_spec


@dataclass(frozen=True)
class Plain:
    """What the plain product moves.

    Attributes:
      kinds: its collectives, {kind: count}. An all-reduce of which each device keeps a slice only
        counts as a reduce-scatter, as backends that have the pass compile it.
      bytes: that a device receives, under ring algorithms.
      note: why nothing is known, where `kinds` is None.
    """

    kinds: Mapping[str, int] | None = None
    bytes: float = 0.0
    note: str = ""


def plain(record: Record) -> Plain:
    """Compile the plain product of a record's shapes and specs and read what it moves."""
    op = record.op
    if not isinstance(op, GemmOp):
        return Plain(note="no single XLA op to compare with")
    placement = record.placement
    result = next((w for w in record.wanted if w is not None), placement.results[0])
    return _compiled(
        op.dims(record.shapes),
        record.shapes[:2],
        record.dtypes[0],
        (record.offered[0], record.offered[1], result),
        record.sizes,
        _devices(),
    )


def _devices() -> tuple[Any, ...]:
    """Of the mesh that is set, which a program has to be compiled for; else all."""
    mesh = jax.sharding.get_mesh()
    return tuple(jax.devices() if mesh.empty else mesh.devices.flat)


@lru_cache(maxsize=512)
def _compiled(
    dims: GemmDims,
    shapes: Shapes,
    dtype: str,
    specs: tuple[Spec, ...],
    sizes: AxisSizes,
    devices: tuple[Any, ...],
) -> Plain:
    count = prod(n for _, n in sizes)
    if len(devices) % count:
        return Plain(note=f"a mesh of {count} devices, of which there are {len(devices)}")
    # The CPU's compiler widens collectives of 16-bit arrays: float32 then, and its bytes scaled.
    wide = jax.default_backend() == "cpu" and jnp.dtype(dtype).itemsize < 4
    compiled_dtype = jnp.dtype("float32" if wide else dtype)
    # Axes that the record does not know, those of another type, are one that shards nothing.
    names = (*(a for a, _ in sizes), "others")
    grid = np.array(devices).reshape(*(n for _, n in sizes), -1)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    shardings = [NamedSharding(mesh, to_partition_spec(s)) for s in specs]
    operands = [jax.ShapeDtypeStruct(shape, compiled_dtype) for shape in shapes]
    contracting, batch = (dims.lhs_k, dims.rhs_k), (dims.lhs_batch, dims.rhs_batch)

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(lhs, rhs, (contracting, batch))

    jitted = jax.jit(product, in_shardings=tuple(shardings[:2]), out_shardings=shardings[2])
    # No ambient mesh: an Explicit one would want types, and the product is to be the partitioner's.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        try:
            text = jitted.lower(*operands).compile().as_text()
        except ValueError as error:  # specs that do not divide, which jit refuses for arguments
            return Plain(note=f"refuses these specs: {str(error).splitlines()[0]}")
    scale = jnp.dtype(dtype).itemsize / compiled_dtype.itemsize
    return _read(text or "", scale)


def _read(text: str, scale: float) -> Plain:
    kept = _scattered(text)
    kinds: dict[str, int] = {}
    total = 0.0
    for number, one in enumerate(hlo.collectives(text)):
        scatters = one.kind == "all-reduce" and number in kept
        kind = "reduce-scatter" if scatters else one.kind
        kinds[kind] = kinds.get(kind, 0) + 1
        total += hlo.received_bytes(one) * (0.5 if scatters else 1.0)
    return Plain(kinds, total * scale)


def _scattered(text: str) -> set[int]:
    """Which collectives, by their number, are all-reduces that only slices read."""
    instructions = hlo_text.parse(text)
    users: dict[str, list[hlo_text.Instruction]] = {}
    slicing = {i.computation for i in instructions.values() if i.opcode == "dynamic-slice"}
    for one in instructions.values():
        for operand in one.operands:
            users.setdefault(operand, []).append(one)

    def slices(name: str) -> bool:
        reads = users.get(name, ())
        return bool(reads) and all(
            u.opcode == "dynamic-slice"
            or (u.opcode == "fusion" and u.calls in slicing)
            or (u.opcode in ("bitcast", "copy", "reshape", "all-reduce-done") and slices(u.name))
            for u in reads
        )

    kinds = [
        i for i in instructions.values() if i.opcode.removesuffix("-start") in get_args(hlo.Kind)
    ]
    return {n for n, one in enumerate(kinds) if slices(one.name)}
