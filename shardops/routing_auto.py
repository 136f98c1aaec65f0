"""The route over Auto axes: custom_partitioning, which asks for a plan while XLA partitions."""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from shardops.op import Arrays, Op, Placement, bare
from shardops.rules.shardy import rule
from shardops.rules.spec import Spec, axes_in, to_partition_spec, to_spec
from shardops.version import __version__

_NO_MESH = AbstractMesh((), ())


def run_auto(op: Op, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Run `op` where the partitioner decides: it calls back with the layouts it would offer."""
    ambient = jax.sharding.get_abstract_mesh()
    # The compiled program is cached under its text alone where custom_partitioning's pointers are
    # left out of the key: a constant of the statics keeps different ops apart.
    fingerprint = np.uint32(zlib.crc32(f"{__version__} {op!r}".encode()))
    return _partitioned(op, ambient if ambient.manual_axes else None)(*arrays, fingerprint)


@lru_cache(maxsize=4096)
def _partitioned(op: Op, manual: AbstractMesh | None) -> Callable[..., tuple[jax.Array, ...]]:
    @custom_partitioning
    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bare(op, *operands[:-1])

    def place(mesh: Any, args: Any, results: Any) -> tuple[Placement, Any, Any]:
        named, full = _meshes(manual, mesh)
        shapes = tuple(tuple(a.shape) for a in args[:-1])
        offered = tuple(_offered(a, named) or to_spec(None, len(a.shape)) for a in args[:-1])
        wanted = tuple(_offered(r, named) for r in results)
        return op.place(shapes, offered, tuple(named.shape.items()), wanted), named, full

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        placement, named, full = place(mesh, args, results)

        def lower(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # An Explicit ambient mesh would put a sharding into the reducer of a psum.
            with jax.sharding.use_abstract_mesh(_NO_MESH), jax.named_scope(op.scope):
                return op.local(placement.plan, operands[:-1], bare)

        ins = tuple(NamedSharding(named, to_partition_spec(s)) for s in (*placement.operands, ()))
        outs = tuple(NamedSharding(named, to_partition_spec(s)) for s in placement.results)
        return full, lower, outs, ins

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        # GSPMD asks here, and an exception would end the process. A wrong guess only costs bytes.
        try:
            unknown = jax.tree.map(lambda r: jax.ShapeDtypeStruct(r.shape, r.dtype), results)
            placement, named, _ = place(mesh, args, unknown)
            return tuple(NamedSharding(named, to_partition_spec(s)) for s in placement.results)
        except Exception:
            return tuple(NamedSharding(mesh, jax.P()) for _ in results)

    def shardy(mesh: Any, operand_types: Any, result_types: Any) -> str:
        ins, outs = op.factors(tuple(tuple(t.shape) for t in operand_types[:-1]))
        return rule([*ins, []], outs)

    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=shardy,
        decode_shardings=False,  # decoding fails the compile where a reshape has split an axis
    )
    return call


def _meshes(manual: AbstractMesh | None, mesh: Any) -> tuple[Any, Any]:
    """The mesh that offered shardings speak of, and the one that collectives name."""
    if manual is None:
        return mesh, mesh

    def auto(names: Sequence[str]) -> AbstractMesh:
        types = (AxisType.Auto,) * len(names)
        return AbstractMesh(tuple(manual.shape[n] for n in names), tuple(names), axis_types=types)

    return (
        auto([n for n in manual.axis_names if n not in manual.manual_axes]),
        auto(manual.axis_names),
    )


def _offered(info: Any, mesh: Any) -> Spec | None:
    """The spec of an offered sharding; None where mesh axes cannot say it.

    After a reshape such as [8@tp4] -> [2, 4] an axis is split over two dims: gathered then.
    """
    sharding = getattr(info, "sharding", None)
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding):
        return to_spec(sharding.spec, len(info.shape))
    # Private: the partitioner's own notation has no public decoder.
    from jax._src.sharding_impls import parse_flatten_op_sharding

    try:
        partition = parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0]
    except (ValueError, IndexError, AssertionError, NotImplementedError, StopIteration):
        return None
    spec = to_spec(partition, len(info.shape))
    return spec if set(axes_in(spec)) <= set(mesh.axis_names) else None
