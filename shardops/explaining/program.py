"""Which of the recorded ops are in a program, and how often.

On Explicit axes an op is recorded as it is traced. JAX traces a function that is called twice with
the same types once, and throws some traces away: that of the function itself where its derivative
has another forward. The program says what is left. On Auto axes an op is recorded as it is
compiled, and the records are those of the program. Without a mesh it is not known while tracing
whether arguments come sharded: then the partitioner places the op, and that record counts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

# Private: the public module has no walk over a program that leaves out what nobody uses.
from jax._src.interpreters.partial_eval import dce_jaxpr

from shardops.op import Op, Shapes
from shardops.recording import Record
from shardops.rules.spec import Spec, to_spec

_Specs = tuple[Spec, ...]
_Key = tuple[Op | None, Shapes, tuple[str, ...], _Specs, _Specs]  # shapes, dtypes of the operands


def in_program(records: Sequence[Record], jaxpr: Any) -> list[Record]:
    """Records of a traced program in its order, once for each place.

    Args:
      records: of one trace and compilation.
      jaxpr: of the program, with all its results in use.
    Returns: those of Auto axes last.
    """
    auto = [r for r in records if r.route == "auto"]
    routes = ("explicit",) if auto else ("explicit", "alone")
    traced = {_key(r): r for r in records if r.route in routes}
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    return [traced[key] for key in _placed(live) if key in traced] + auto


def _key(record: Record) -> _Key:
    operands = record.op, record.shapes, record.dtypes
    if record.route == "alone":
        return *operands, (), ()
    return *operands, record.placement.taken, record.placement.results


def _placed(jaxpr: Any, op: Op | None = None) -> Iterator[_Key]:
    """Keys of a program's ops, and of their shard_maps; in its branches, loops and calls too.

    Args:
      op: of which the program is a part.
    """
    for one in jaxpr.eqns:
        within = op
        operands, results = ([v.aval for v in side] for side in (one.invars, one.outvars))
        if one.primitive.name == "custom_vmap_call":
            within = getattr(one.params["rule"], "op", None)  # a copy of what the router's rule has
            yield within, *_types(operands), (), ()
        if one.primitive.name == "shard_map":
            taken = _specs(one.params["in_specs"], operands)
            yield op, *_types(operands), taken, _specs(one.params["out_specs"], results)
        for value in one.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _placed(inner, within)


def _types(arrays: Sequence[Any]) -> tuple[Shapes, tuple[str, ...]]:
    return tuple(a.shape for a in arrays), tuple(a.dtype.name for a in arrays)


def _specs(partitions: Any, arrays: Sequence[Any]) -> _Specs:
    pairs = zip(partitions, arrays, strict=True)
    return tuple(to_spec(p, a.ndim) for p, a in pairs)
