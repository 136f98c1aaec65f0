"""A program as a graph: nodes may be exchanged, and are put in order again at the end."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from shardops.fusing.marking import Mark

# JAX types them as of any kind; those here are of arrays, whose types have dtype and sharding.
Variable = Any
Atom = Any  # a variable or a literal


def is_variable(atom: Atom) -> bool:
    return isinstance(atom, Var)


@dataclass(eq=False)
class Node:
    """An equation, or a fused call that stands for several."""

    at: int  # its place in the program as it was traced
    eqn: Any  # of a fused call the op's own
    reads: tuple[Atom, ...]
    writes: tuple[Variable, ...]
    mark: Mark | None = None  # of an op as it was called
    call: Callable[..., Sequence[Any]] | None = None  # fused: values read -> written, then renewed
    renews: tuple[Variable, ...] = ()  # from then on they are what this has returned in their place

    @property
    def name(self) -> str:
        """What does it, in a report."""
        return self.mark.op.scope if self.mark else self.eqn.primitive.name


class Graph:
    """The nodes of a program, who makes and who reads a variable, and what must come after what."""

    def __init__(self, jaxpr: Any, nodes: Iterable[Node]) -> None:
        self.outvars = jaxpr.outvars
        self.returned = {v for v in jaxpr.outvars if is_variable(v)}
        self.felt = _felt(jaxpr)
        self._nodes: dict[Node, None] = {}
        self._makers: dict[Variable, Node] = {}
        self._readers: dict[Variable, dict[Node, None]] = defaultdict(dict)
        self._after: dict[Node, list[Node]] = defaultdict(list)  # besides what it reads
        last = None
        for node in nodes:
            self.insert(node)
            if _ordered(node.eqn):
                if last:
                    self._after[node].append(last)
                last = node

    def nodes(self) -> Iterator[Node]:
        return iter(list(self._nodes))

    def insert(self, node: Node) -> None:
        self._nodes[node] = None
        for var in node.writes:
            self._makers.setdefault(var, node)
        for var in node.reads:
            if is_variable(var):
                self._readers[var][node] = None

    def remove(self, node: Node) -> None:
        del self._nodes[node]
        for var in node.writes:
            if self._makers.get(var) is node:
                del self._makers[var]
        for var in node.reads:
            if is_variable(var):
                self._readers[var].pop(node, None)  # it may read one twice

    def replace(self, old: Sequence[Node], new: Node) -> None:
        """`new` in place of `old`; whatever came after the old ones comes after it."""
        for node in old:
            self.remove(node)
            self._after[new] += self._after.pop(node, [])
        for node, before in self._after.items():
            self._after[node] = [n for n in (new if b in old else b for b in before) if n != node]
        self.insert(new)

    def maker(self, atom: Atom) -> Node | None:
        """Who makes a value; None of an argument, a constant or a literal."""
        return self._makers.get(atom) if is_variable(atom) else None

    def readers(self, var: Variable) -> list[Node]:
        return list(self._readers[var])

    def only_reader(self, var: Variable) -> Node | None:
        """The one that reads it, where nobody else does and it is not returned."""
        readers = self.readers(var)
        return readers[0] if len(readers) == 1 and var not in self.returned else None

    def before(self, node: Node) -> set[Node]:
        """All that must come before a node."""
        seen: set[Node] = set()
        rest = [node]
        while rest:
            for other in self._needs(rest.pop()):
                if other not in seen:
                    seen.add(other)
                    rest.append(other)
        return seen

    def order_after(self, node: Node, first: Node) -> None:
        self._after[node].append(first)

    def _needs(self, node: Node) -> Iterator[Node]:
        for atom in node.reads:
            maker = self.maker(atom)
            if maker is not None and maker is not node:
                yield maker
        yield from self._after.get(node, ())

    def ordered(self) -> list[Node]:
        """In the order of the trace, but for what has to come later."""
        waiting = {n: {*self._needs(n)} for n in self._nodes}
        following: dict[Node, list[Node]] = defaultdict(list)
        for node, needs in waiting.items():
            for other in needs:
                following[other].append(node)
        ready = [(n.at, n) for n, needs in waiting.items() if not needs]
        heapq.heapify(ready)
        done = []
        while ready:
            _, node = heapq.heappop(ready)
            done.append(node)
            for other in following[node]:
                waiting[other].discard(node)
                if not waiting[other]:
                    heapq.heappush(ready, (other.at, other))
        assert len(done) == len(self._nodes), "fuse: the program has no order"
        return done


def _ordered(eqn: Any) -> bool:
    """Whether it has effects that keep their order. Naming a mesh axis is none."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


def _felt(jaxpr: Any) -> set[Variable]:
    """Variables that may have a cotangent: floats from which a result of floats is reached."""
    felt = {v for v in jaxpr.outvars if is_variable(v) and _inexact(v)}
    for eqn in reversed(jaxpr.eqns):
        passes = _ordered(eqn) or any(v in felt for v in eqn.outvars)
        if passes and eqn.primitive.name != "stop_gradient":
            felt |= {v for v in eqn.invars if not isinstance(v, Literal) and _inexact(v)}
    return felt


def _inexact(var: Variable) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def alike(one: Any, other: Any) -> bool:
    """Whether two types are the same but for what nobody sees: weakness, axes that are Auto."""
    first, second = ((a.shape, a.dtype, a.sharding.spec, a.manual_axis_type) for a in (one, other))
    return first == second


def laid_out_otherwise(fused: Node) -> bool:
    """Whether results of a fused call have other types than those that it stands for."""
    assert fused.call is not None
    results = jax.make_jaxpr(fused.call)(*(a.aval for a in fused.reads)).out_avals
    return not all(alike(r, v.aval) for r, v in zip(results, fused.writes, strict=True))
