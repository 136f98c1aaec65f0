"""The route over Auto axes: custom_partitioning, which asks for a plan while XLA partitions."""

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import _check_vma  # private: see `lower`
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from shardops.moving import mapped_over
from shardops.op import Arrays, Op, bare
from shardops.placing import arrive, placed
from shardops.recording import Record, record, token
from shardops.rules.shardy import rule
from shardops.rules.spec import Axes, Spec, axes_in, to_partition_spec, to_spec
from shardops.version import __version__

_NO_MESH = AbstractMesh((), ())


def run_auto(op: Op, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Run `op` where the partitioner decides: it calls back with the layouts it would offer."""
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.manual_axes and not _uses_shardy():
        # GSPMD cannot say such layouts and ends the process. It partitions plain jnp all the same.
        statics: Any = op
        return bare(replace(statics, kernel=False), *arrays)
    # The compiled program is cached under its text alone where custom_partitioning's pointers are
    # left out of the key: a constant of the statics keeps different ops apart.
    fingerprint = np.uint32(zlib.crc32(f"{__version__} {op!r}".encode()))
    return _partitioned(op, len(arrays), ambient, token())(*arrays, fingerprint, *_probes(ambient))


def _uses_shardy() -> bool:
    settings: Any = jax.config  # its options are attributes that no type names
    return settings.jax_use_shardy_partitioner


@lru_cache(maxsize=4096)
def _partitioned(
    op: Op, count: int, ambient: AbstractMesh, listener: int | None
) -> Callable[..., tuple[jax.Array, ...]]:
    """Operands of the call: the op's `count` arrays, the fingerprint, the probes."""

    @custom_partitioning
    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bare(op, *operands[:count])

    def place(mesh: Any, args: Any, results: Any) -> tuple[Record, Any]:
        arrays, probes = args[:count], args[count + 1 :]
        named = _named_mesh(ambient, mesh, probes)
        offers = [None if named is None else _offered(a, named) for a in (*arrays, *results)]
        offered = tuple(
            to_spec(None, len(a.shape)) if s is None else s
            for a, s in zip(arrays, offers, strict=False)
        )
        sizes = () if named is None else tuple(named.shape.items())
        shapes = tuple(tuple(a.shape) for a in arrays)
        itemsizes = tuple(np.dtype(a.dtype).itemsize for a in arrays)
        wanted = tuple(offers[count:])
        placement = placed(op, shapes, offered, sizes, wanted, itemsizes)
        dtypes = tuple(np.dtype(a.dtype).name for a in arrays)
        entry = Record(op, "auto", shapes, dtypes, offered, wanted, sizes, placement)
        return entry, named

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        entry, named = place(mesh, args, results)
        record(listener, entry)
        placement = entry.placement
        full = _auto_mesh(ambient, ambient.axis_names) if ambient.manual_axes else mesh
        full = ambient if full.empty else full

        def lower(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # An Explicit ambient mesh would put a sharding into the reducer of a psum, and an
            # eager shard_map would have it check what varies over a mesh that is not here.
            plain = (_check_vma(False), jax.sharding.use_abstract_mesh(_NO_MESH))
            with plain[0], plain[1], mapped_over(full.axis_names), jax.named_scope(op.scope):
                arrived = arrive(op, operands[:count], placement)
                return op.local(placement.plan, arrived, bare)

        def sharding(spec: Spec) -> NamedSharding:
            return NamedSharding(full if named is None else named, to_partition_spec(spec))

        probes = [((axis,) if named else (),) for axis in _probed_axes(ambient)]
        ins = tuple(map(sharding, (*placement.taken, (), *probes)))
        return full, lower, tuple(map(sharding, placement.results)), ins

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        # GSPMD asks here, and an exception would end the process. A wrong guess only costs bytes.
        try:
            unknown = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
            entry, named = place(mesh, args, unknown)
            results = entry.placement.results
            return tuple(NamedSharding(named, to_partition_spec(s)) for s in results)
        except Exception:
            return tuple(NamedSharding(mesh, jax.P()) for _ in results)

    def shardy(mesh: Any, operand_types: Any, result_types: Any) -> str:
        ins, outs = op.factors(tuple(tuple(t.shape) for t in operand_types[:count]))
        probes = [[f"probe{n}"] for n in range(len(_probed_axes(ambient)))]
        return rule([*ins, [], *probes], outs)

    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=shardy,
        decode_shardings=False,  # decoding fails the compile where a reshape has split an axis
    )
    return call


# ---- which axis is which ------------------------------------------------------------------------
#
# Shardings are offered as numbers of devices. On a whole mesh these are the mesh's own. Inside a
# manual region they count the devices of the other axes, in an order that XLA chooses anew for each
# program: two axes of equal size may have changed places, and a sum by name would run over the
# wrong one. So there one small operand a free axis is sharded over that axis alone, and shows it.


def _free_axes(ambient: AbstractMesh) -> Axes:
    """Axes of more than one device that are not manual, Explicit ones of an enclosing vmap too."""
    names = ambient.axis_names if ambient.manual_axes else ()
    return tuple(n for n in names if n not in ambient.manual_axes and ambient.shape[n] > 1)


def _probed_axes(ambient: AbstractMesh) -> Axes:
    free = _free_axes(ambient)
    return tuple(n for n in free if n in ambient.auto_axes) if len(free) > 1 else ()


def _probes(ambient: AbstractMesh) -> list[jax.Array]:
    return [
        jax.lax.with_sharding_constraint(
            jnp.zeros(ambient.shape[axis], jnp.uint8), NamedSharding(ambient, jax.P(axis))
        )
        for axis in _probed_axes(ambient)
    ]


def _named_mesh(ambient: AbstractMesh, mesh: Any, probes: Sequence[Any]) -> Any:
    """A mesh whose device numbers are those of the offered shardings; None if it cannot be told."""
    if not ambient.manual_axes:
        return ambient if mesh.empty else mesh  # no mesh is given where a program has no arguments
    free = _free_axes(ambient)
    probed = _probed_axes(ambient)
    others = tuple(n for n in ambient.axis_names if n not in {*free, *ambient.manual_axes})
    for order in itertools.permutations(free):
        candidate = _auto_mesh(ambient, order + others)
        shown = [_offered(p, candidate) for p in probes]
        if shown == [((axis,),) for axis in probed]:
            return candidate
    return None


def _auto_mesh(ambient: AbstractMesh, names: Axes) -> AbstractMesh:
    types = (AxisType.Auto,) * len(names)
    return AbstractMesh(tuple(ambient.shape[n] for n in names), names, axis_types=types)


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
    except (ValueError, LookupError, AssertionError, NotImplementedError, StopIteration):
        return None
    spec = to_spec(partition, len(info.shape))
    return spec if set(axes_in(spec)) <= set(mesh.axis_names) else None
