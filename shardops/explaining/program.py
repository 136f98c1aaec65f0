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

from shardops.recording import Record
from shardops.rules.spec import Spec, to_spec

_Key = tuple[str, tuple[tuple[int, ...], ...], tuple[Spec, ...], tuple[Spec, ...]]


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
    return [traced[key] for key in _mapped(live) if key in traced] + auto


def _key(record: Record) -> _Key:
    placement = record.placement
    if record.route == "alone":
        return record.op.scope, record.shapes, (), ()
    return record.op.scope, record.shapes, placement.taken, placement.results


def _mapped(jaxpr: Any) -> Iterator[_Key]:
    """Keys of the shard_maps and of the ops of a program, those in its branches, loops and calls
    too."""
    for one in jaxpr.eqns:
        if one.primitive.name == "custom_vmap_call":
            shapes = tuple(v.aval.shape for v in one.invars)
            scopes = (_scope(inner) for inner in one.params["call"].jaxpr.eqns)
            yield next((s for s in scopes if s.startswith("shardops.")), ""), shapes, (), ()
        if one.primitive.name == "shard_map":
            operands, results = ([v.aval for v in side] for side in (one.invars, one.outvars))
            yield (
                _scope(one),
                tuple(a.shape for a in operands),
                _specs(one.params["in_specs"], operands),
                _specs(one.params["out_specs"], results),
            )
        for value in one.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _mapped(inner)


def _scope(equation: Any) -> str:
    return str(equation.source_info.name_stack).rpartition("/")[2]


def _specs(partitions: Any, arrays: Sequence[Any]) -> tuple[Spec, ...]:
    pairs = zip(partitions, arrays, strict=True)
    return tuple(to_spec(p, a.ndim) for p, a in pairs)
