"""Norms: the residual sum before one is its `add`, the residual branch beside it its `h`, a
quantisation of its result alone its `quantizer`.

    s = a + b;  y = norm(s);  ... s ...    ->    y, s = norm(a, add=b, return_input=True); ... s ...
                y = norm(x);  ... x ...    ->    y, x = norm(x, return_input=True);        ... x ...
                quantize(norm(x), q)       ->    norm(x, quantizer=q)

Forward the second one changes nothing. Backward, the cotangents of the uses of x reach the norm by
its second result, and its kernel adds them to dx. So every use that can come after the norm does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardops import routing
from shardops.fusing.graph import Graph, Node, Variable, alike, is_variable, laid_out_otherwise
from shardops.fusing.quantisers import Quantiser, quantiser_of
from shardops.fusing.report import Fusion, Miss, where
from shardops.primitives.norm_op import NormForward

_BETWEEN = ("name", "sharding_constraint", "reshard", "optimization_barrier")


def is_norm(node: Node) -> bool:
    """Whether it is a norm with y, or y and h, as results: not one that quantises."""
    mark = node.mark
    if mark is None or not isinstance(mark.op, NormForward):
        return False
    return len(mark.operands) == 4 and len(node.writes) == 1 + bool(mark.static)


@dataclass
class _Norm:
    """A norm as it is to be called."""

    node: Node
    op: Any
    operands: list[Any]  # x, gamma, beta, add
    y: Variable
    h: tuple[Variable, ...]  # variables of its second result, none where it has none
    quantiser: Quantiser | None = None

    @classmethod
    def of(cls, node: Node) -> "_Norm":
        mark = node.mark
        assert mark is not None
        rest = iter(node.reads)
        operands = [None if t is None else next(rest) for t in mark.operands]
        return cls(node, mark.op, operands, node.writes[0], node.writes[1:])

    @property
    def name(self) -> str:
        return self.op.scope.removeprefix("shardops.")

    @property
    def nodes(self) -> list[Node]:
        """What a call of it stands for."""
        return [self.node, *(() if self.quantiser is None else self.quantiser.nodes)]


def fuse_norm(graph: Graph, node: Node) -> Iterator[Fusion | Miss]:
    """Fuse what there is to fuse around one norm."""
    norm, at = _Norm.of(node), where(node.eqn)
    quantiser = quantiser_of(graph, node, norm.operands[0])
    if isinstance(quantiser, Quantiser):
        norm.quantiser = quantiser
        if laid_out_otherwise(_call(norm, returns=bool(norm.h))):
            norm.quantiser = None
            yield Miss(norm.name, at, "with `quantizer` its results would be laid out otherwise")
    elif quantiser is not None:
        yield Miss(norm.name, at, quantiser)
    made = _sum_before(graph, norm)
    if isinstance(made, str):
        yield Miss(norm.name, at, made)
    fused = None
    if isinstance(made, Node):
        total = made.writes[0]
        others = [r for r in graph.readers(total) if r is not node]
        kept = total in graph.returned or others
        summing = replace(
            norm,
            op=replace(norm.op, add=True),
            operands=[made.reads[0], *norm.operands[1:3], made.reads[1]],
            h=(*norm.h, total) if kept else norm.h,
        )
        fused = _call(summing, returns=bool(summing.h))
        if laid_out_otherwise(fused):
            fused = None
            yield Miss(norm.name, at, "with `add` its results would be laid out otherwise")
        else:
            graph.replace([made, *norm.nodes], fused)
            what = f"add, of {_shown(total)}" + (", which it also returns" if kept else "")
            yield Fusion("add", norm.name, at, what)
    else:
        branches = _branches(graph, norm)
        if isinstance(branches, str) and made is None:
            yield Miss(norm.name, at, branches)
        elif isinstance(branches, list):
            x = norm.operands[0]
            fused = _call(norm, returns=True, renews=(x,))
            graph.replace(norm.nodes, fused)
            for other in branches:
                graph.order_after(other, fused)
            users = [f"`{b.name}`" for b in branches] + ["the caller"] * (x in graph.returned)
            uses = ", ".join(dict.fromkeys(users))
            yield Fusion("return_input", norm.name, at, f"{_shown(x)} goes on to {uses}")
    if norm.quantiser is not None:
        if fused is None:
            graph.replace(norm.nodes, _call(norm, returns=bool(norm.h)))
        form = norm.quantiser.form
        what = f"quantizer, of {form.mode.name}, {form.format}, {form.blocks.layout}"
        yield Fusion("quantizer", norm.name, at, what)


def _call(norm: _Norm, *, returns: bool, renews: tuple[Variable, ...] = ()) -> Node:
    mark, quantiser = norm.node.mark, norm.quantiser
    assert mark is not None
    function, op = mark.function, norm.op
    given = [a is not None for a in norm.operands]
    copies = len(norm.h) + len(renews)
    reads, y = tuple(a for a in norm.operands if a is not None), (norm.y,)
    if quantiser is not None:
        op = replace(op, form=quantiser.form)
        given += [True] * len(quantiser.scale)
        reads, y = (*reads, *quantiser.scale), quantiser.writes

    def call(*values: Any) -> list[Any]:
        rest = iter(values if quantiser is None else routing.match_varying(*values))
        results = function(op, returns, *(next(rest) if g else None for g in given))
        first, last = (results[0], [results[1]] * copies) if returns else (results, [])
        if quantiser is None:
            return [first, *last]
        straight = [first.straight] * (len(quantiser.nodes) - 1)
        first = replace(first, straight=None)
        if quantiser.form.given:  # the same on all devices, which the matched one need not be
            first = replace(first, scale_inv=jax.lax.stop_gradient(values[-1]))
        return [*jax.tree.leaves(first), *straight, *last]

    return replace(norm.node, reads=reads, writes=(*y, *norm.h), call=call, renews=renews)


# ---- the sum before ------------------------------------------------------------------------------


def _sum_before(graph: Graph, norm: _Norm) -> Node | str | None:
    """The sum that a norm can carry out itself; why not, where there is one; or None."""
    x = norm.operands[0]
    maker = graph.maker(x)
    if maker is None or norm.op.add:
        return None
    if maker.name != "add":
        return _nearly_a_sum(graph, maker)
    terms = maker.reads
    if any(t.aval.shape != x.aval.shape for t in terms) or any(
        graph.maker(t) is not None and _broadcasts(graph.maker(t)) for t in terms
    ):
        return "a term of the sum before it is broadcast"
    if any(v.aval.weak_type for v in (x, *terms)):
        return "the sum before it is weakly typed"
    if not all(alike(t.aval, x.aval) for t in terms):
        return "the terms of the sum before it are not sharded alike"
    if ({*graph.readers(x)} - {norm.node}) & graph.before(norm.node):
        return "the sum before it is also used by the norm's own parameters"
    return maker


def _broadcasts(maker: Node | None) -> bool:
    return maker is not None and maker.name == "broadcast_in_dim"


def _nearly_a_sum(graph: Graph, maker: Node) -> str | None:
    before = graph.maker(maker.reads[0]) if maker.reads else None
    if before is None or before.name != "add" or len(maker.reads) != 1:
        return None
    if maker.name == "convert_element_type":
        wide, own = maker.reads[0].aval.dtype, maker.writes[0].aval.dtype
        return f"sum is {wide}, norm input {own}"
    if maker.name in _BETWEEN:
        return f"`{maker.name}` stands between the sum and the norm"
    return None


# ---- the residual branch -------------------------------------------------------------------------


def _branches(graph: Graph, norm: _Norm) -> list[Node] | str | None:
    """Who is to take the norm's input from the norm; or why nobody can."""
    x = norm.operands[0]
    if norm.op.add or not is_variable(x) or x.aval.weak_type:
        return None
    others = [r for r in graph.readers(x) if r is not norm.node]
    before = graph.before(norm.node)
    later = [r for r in others if r not in before]
    if x in graph.returned or any(v in graph.felt for r in later for v in r.writes):
        return later
    if any(r in before and r.mark is None for r in others):
        return "its input is otherwise used by the norm's own parameters alone"
    maker = graph.maker(x)
    if maker is not None and maker.name == "convert_element_type":
        wide = maker.reads[0]
        if is_variable(wide) and graph.readers(wide) != [maker]:
            return f"the residual branch is {wide.aval.dtype}, norm input {x.aval.dtype}"
    return None


def _shown(var: Variable) -> str:
    return f"{var.aval.dtype}[{','.join(map(str, var.aval.shape))}]"
