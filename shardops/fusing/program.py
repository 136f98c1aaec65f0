"""A traced program as a function that computes the same, with fused ops.

Programs inside of it (jits, loops, branches, checkpoints, shard_maps) are rewritten too; those of
functions with derivatives of their own are left as they are. Equations are carried out as JAX does
it, under the names and in the context that they were traced in.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax

# Private: there is no public way to carry out one equation under its own names.
from jax._src import source_info_util
from jax.core import Tracer
from jax.extend.core import Literal

from shardops.fusing.epilogues import fuse_product, is_product
from shardops.fusing.graph import Graph, Node, Variable, is_variable
from shardops.fusing.marking import marked, recognised
from shardops.fusing.norms import fuse_norm, is_norm
from shardops.fusing.report import Fusion, Miss, Report, where

_KEPT = 256  # inner programs that are remembered

# Ops that are fused into another one, if at all: by themselves no near misses.
_UNSUNG = ("quantize", "straight")

# The parameters in which an equation has programs that its own results are computed by.
_INNER = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


class Program:
    """`program(*args)` computes the results of a jaxpr."""

    def __init__(self, jaxpr: Any, known: dict[Any, "Program"]) -> None:
        self._jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        self._consts = tuple(getattr(jaxpr, "consts", ()))
        self._known = known  # by jaxpr: JAX too tells by the jaxpr whether a program is compiled
        self._inner: dict[int, Program] = {}
        self._notes: list[Fusion | Miss] = []
        self.__name__ = "fused"  # in JAX's messages

    def __call__(self, *args: Any) -> list[Any]:
        values: dict[Variable, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        values.update(zip(self._jaxpr.constvars, self._consts, strict=True))
        values.update(zip(self._jaxpr.invars, args, strict=True))
        for node, done in self._steps:
            results = self._carry_out(node, [read(a) for a in node.reads])
            values.update(zip((*node.writes, *node.renews), results, strict=True))
            for var in done:
                values.pop(var, None)
        return [read(a) for a in self._jaxpr.outvars]

    def report(self) -> Report:
        """What was fused when it was called."""
        notes = [*self._all_notes()]
        fused = (n for n in notes if isinstance(n, Fusion))
        return Report(tuple(fused), tuple(n for n in notes if isinstance(n, Miss)))

    def _all_notes(self) -> Iterator[Fusion | Miss]:
        yield from self._notes
        for inner in self._inner.values():
            yield from inner._all_notes()

    # ---- what is done ----------------------------------------------------------------------------

    @cached_property
    def _steps(self) -> list[tuple[Node, list[Variable]]]:
        """The nodes in order, each with the variables that nobody reads after it.

        Made at the first call: types of inner programs name mesh axes that are there only then.
        """
        nodes = [
            Node(at, eqn, tuple(eqn.invars), tuple(eqn.outvars), recognised(eqn))
            for at, eqn in enumerate(self._jaxpr.eqns)
        ]
        graph = Graph(self._jaxpr, nodes)
        for node in nodes:
            if is_product(node):
                self._notes += fuse_product(graph, node)
        for node in nodes:
            if is_norm(node):
                self._notes += fuse_norm(graph, node)
        done: set[Any] = {v for v in self._jaxpr.outvars if is_variable(v)}
        steps = []
        for node in reversed(graph.ordered()):
            used = {v for v in (*node.reads, *node.writes, *node.renews) if is_variable(v)}
            steps.append((node, [*(used - done)]))
            done |= used
        return steps[::-1]

    def _carry_out(self, node: Node, values: list[Any]) -> Sequence[Any]:
        eqn = node.eqn
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=names),
            eqn.ctx.manager,
        ):
            if node.call is not None:
                return node.call(*values)
            if not _has_marks(eqn):
                return _bind(eqn, eqn.params, values)
            return self._nested(node, values)

    def _nested(self, node: Node, values: list[Any]) -> Sequence[Any]:
        """An equation with ops of shardops inside."""
        eqn = node.eqn
        name, params = eqn.primitive.name, eqn.params
        if marked(eqn):
            if node.mark is None and _op_name(eqn) not in _UNSUNG:
                why = "it is under vmap or a gradient; fuse the function inside of that"
                self._note(Miss(_op_name(eqn), where(eqn), why))
            return self._program(params["jaxpr"])(*values)
        if name == "shard_map" and "newly_manual_axes" in params:
            return jax.shard_map(
                _as_tuple(self._program(params["jaxpr"])),
                mesh=params["mesh"],
                in_specs=params["in_specs"],
                out_specs=params["out_specs"],
                axis_names=params["newly_manual_axes"],
                check_vma=params["check_vma"],
            )(*values)
        if name in ("remat2", "checkpoint") and not params["differentiated"]:
            again = jax.checkpoint(
                self._program(params["jaxpr"]),
                prevent_cse=params["prevent_cse"],
                policy=params["policy"],
            )
            return again(*values)
        if name in _INNER:
            changed = {key: self._rewritten(params[key]) for key in _INNER[name]}
            return _bind(eqn, params | changed, values)
        for op in _marks_in(eqn):
            if _op_name(op) in _UNSUNG:
                continue
            self._note(Miss(_op_name(op), where(op), f"`{name}` around it is left as it is"))
        return _bind(eqn, params, values)

    def _note(self, note: Fusion | Miss) -> None:
        if note not in self._notes:
            self._notes.append(note)

    # ---- programs inside -------------------------------------------------------------------------

    def _rewritten(self, jaxpr: Any) -> Any:
        """A jaxpr, or a tuple of them, as the programs that they have become."""
        if isinstance(jaxpr, tuple):
            return tuple(map(self._rewritten, jaxpr))
        if not any(_has_marks(e) for e in jaxpr.jaxpr.eqns):
            return jaxpr
        # JAX remembers what it traced a function to, and so finds compiled programs again.
        new = jax.make_jaxpr(self._program(jaxpr))(*(v.aval for v in jaxpr.jaxpr.invars))
        return new if [*new.out_avals] == [*jaxpr.out_avals] else jaxpr

    def _program(self, jaxpr: Any) -> "Program":
        program = self._known.get(jaxpr) or Program(jaxpr, self._known)
        if not any(isinstance(c, Tracer) for c in program._consts):
            self._known[jaxpr] = program
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        self._inner[id(jaxpr)] = program
        return program


def _as_tuple(function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    return lambda *args: tuple(function(*args))


def _bind(eqn: Any, params: Any, values: Sequence[Any]) -> Sequence[Any]:
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def _op_name(eqn: Any) -> str:
    return (marked(eqn) or "").removeprefix("shardops.").rpartition(".")[0]


def _has_marks(eqn: Any) -> bool:
    """Whether an equation is a marked call, or has one inside."""
    return next(_marks_in(eqn), None) is not None


def _marks_in(eqn: Any) -> Iterator[Any]:
    """The marked calls that an equation is or has inside."""
    if marked(eqn):
        yield eqn
        return
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            for each in getattr(inner, "eqns", ()):
                yield from _marks_in(each)
