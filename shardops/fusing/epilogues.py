"""Products: bias and activation after one become its epilogue.

    z = gemm(x, w);  out = gelu(z + bias)    ->    out = gemm(x, w, bias=bias, activation="gelu")

Nobody else may use what is between: the product then has it no more. What the equations round to
the result's dtype on the way, the epilogue keeps in float32.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from shardops import routing
from shardops.fusing.expressions import Expressions
from shardops.fusing.graph import Graph, Node, Variable, is_variable, laid_out_otherwise
from shardops.fusing.marking import Mark
from shardops.fusing.report import Fusion, Kind, Miss, where
from shardops.primitives.gemm_op import GemmOp

_LIMIT = 64  # equations looked at for one activation


def is_product(node: Node) -> bool:
    mark = node.mark
    return mark is not None and isinstance(mark.op, GemmOp) and len(mark.operands) == 4


def fuse_product(graph: Graph, node: Node) -> Iterator[Fusion | Miss]:
    """Fuse the bias and the activation that follow one product."""
    mark = node.mark
    assert mark is not None
    found = _Epilogue(graph, node, mark.op)
    found.search()
    name, at = mark.op.scope.removeprefix("shardops."), where(node.eqn)
    if found.why:
        yield Miss(name, at, found.why)
    if not found.steps:
        return
    fused = found.call(mark)
    if laid_out_otherwise(fused):
        yield Miss(name, at, "with its epilogue the result would be laid out otherwise")
        return
    graph.replace([node, *found.steps], fused)
    kinds: dict[tuple[bool, bool], Kind] = {
        (True, True): "bias+activation",
        (True, False): "bias",
        (False, True): "activation",
    }
    bias, activation = found.bias is not None, found.activation
    what = ["bias"] * bias + [f'activation="{activation}"'] * bool(activation)
    yield Fusion(kinds[bias, bool(activation)], name, at, ", ".join(what))


class _Epilogue:
    """What follows a product, as far as it can take it in."""

    def __init__(self, graph: Graph, node: Node, op: GemmOp) -> None:
        self.graph, self.node, self.op = graph, node, op
        self.end: Variable = node.writes[0]  # what the product with its epilogue makes
        self.steps: list[Node] = []  # what the epilogue stands for
        self.constraints: list[Node] = []  # of these, shardings asked of something in between
        self.bias: Any = None
        self.activation: str | None = None
        self.why = ""

    def search(self) -> None:
        if self.op.activation is not None or self.op.unreduced:  # nothing may follow an open sum
            return
        self._constrained()
        if self.op.bias is False:
            self._biased()
            self._constrained()
        self._activated()
        # A constraint alone at the end is no epilogue, and stays where it is.
        while self.steps and self.steps[-1] in self.constraints:
            step = self.steps.pop()
            self.constraints.remove(step)
            self.end = step.reads[0]

    def _constrained(self) -> None:
        reader = self.graph.only_reader(self.end)
        if reader is not None and reader.name == "sharding_constraint":
            self.steps.append(reader)
            self.constraints.append(reader)
            (self.end,) = reader.writes

    def _biased(self) -> None:
        adds = [r for r in self.graph.readers(self.end) if r.name == "add"]
        if len(adds) != 1:
            self._nearly_biased()
            return
        (add,) = adds
        others = [a for a in add.reads if a is not self.end]
        bias = _bias_of(self.graph, others[0], self._bias_shape(), self.end) if others else None
        if bias is None or add.writes[0].aval.shape != self.end.aval.shape:
            return
        if self.graph.only_reader(self.end) is None:
            self.why = "the product before its bias is also " + self._used_by({add})
            return
        self.bias = bias
        self.steps.append(add)
        (self.end,) = add.writes

    def _nearly_biased(self) -> None:
        cast = self.graph.only_reader(self.end)
        if cast is None or cast.name != "convert_element_type":
            return
        (wide,) = cast.writes
        add = self.graph.only_reader(wide)
        if add is None or add.name != "add":
            return
        others = [a for a in add.reads if a is not wide]
        if others and _bias_of(self.graph, others[0], self._bias_shape(), wide) is not None:
            self.why = f"a cast to {wide.aval.dtype} stands between the product and its bias"

    def _bias_shape(self) -> tuple[int, ...]:
        assert self.node.mark is not None
        lhs, rhs = (t.shape for t in self.node.mark.operands[:2])
        return tuple(rhs[j] for j in self.op.dims((lhs, rhs)).rhs_free)

    def _activated(self) -> None:
        name, nodes = _activation_of(self.graph, self.end)
        if name is None:
            self._nearly_activated()
            return
        if name not in ("gelu", "silu", "relu"):
            self.why = f"the activation is {name}; the epilogue has gelu (tanh), silu and relu"
            return
        result = nodes[-1].writes[0]
        inner = [self.end, *(v for n in nodes for v in n.writes if v is not result)]
        for var in inner:
            if var in self.graph.returned or {*self.graph.readers(var)} - {*nodes}:
                self.why = f"what {name} is taken of is also {self._used_by({*nodes}, inner)}"
                return
        self.steps += nodes
        self.activation, self.end = name, result

    def _nearly_activated(self) -> None:
        cast = self.graph.only_reader(self.end)
        if cast is None:
            return
        what = f"`{cast.name}` stands"
        if cast.name == "convert_element_type":
            what = f"a cast to {cast.writes[0].aval.dtype} stands"
        elif cast.name not in ("name", "reshard", "optimization_barrier"):
            return
        name, _ = _activation_of(self.graph, cast.writes[0])
        if name:
            self.why = f"{what} between the product and {name}"

    def _used_by(self, own: set[Node], variables: Sequence[Variable] = ()) -> str:
        variables = variables or [self.end]
        if any(v in self.graph.returned for v in variables):
            return "returned"
        others = [r for v in variables for r in self.graph.readers(v) if r not in own]
        return f"used by `{others[0].name}`"

    def call(self, mark: Mark) -> Node:
        """The product with its epilogue."""
        bias = self.bias is not None
        op = replace(self.op, bias=self.op.bias or bias, activation=self.activation)
        given = [t is not None for t in mark.operands]
        shape = self._bias_shape()
        constraints = [c.eqn for c in self.constraints]

        def call(*values: Any) -> list[Any]:
            rest = iter(values[: len(values) - bias])
            lhs, rhs, own_bias, add = (next(rest) if g else None for g in given)
            if bias:
                lead = range(values[-1].ndim - len(shape))
                own_bias = jax.lax.squeeze(values[-1], tuple(lead))
            operands = [lhs, rhs, own_bias, add]
            matched = iter(routing.match_varying(*(a for a in operands if a is not None)))
            out = mark.function(
                op, mark.static, *(None if a is None else next(matched) for a in operands)
            )
            for eqn in constraints:
                out = eqn.primitive.bind(out, **eqn.params)
            return [out]

        reads = (*self.node.reads, *([self.bias] if bias else ()))
        return replace(self.node, reads=reads, writes=(self.end,), call=call)


def _bias_of(graph: Graph, atom: Any, shape: tuple[int, ...], like: Variable) -> Any:
    """What a term repeats over the dims before a product's rhs dims, at most with dims of 1."""
    out = like.aval.shape
    lead = len(out) - len(shape)
    if not shape or not lead or not is_variable(atom):
        return None
    if atom.aval.shape[:lead] not in (out[:lead], (1,) * lead):
        return None
    found = None
    while is_variable(atom):
        if atom.aval.size == math.prod(shape) and atom.aval.shape[-len(shape) :] == shape:
            found = atom
        maker = graph.maker(atom)
        repeats = maker is not None and maker.name == "broadcast_in_dim" and _trailing(maker.eqn)
        same = maker is not None and maker.name in ("pvary", "reshape") and found is not None
        if maker is None or atom.aval.shape == shape or not (repeats or same):
            break
        atom = maker.reads[0]
    # Over rows of which there is one, a term is a bias only if it was repeated: it may as well be a
    # residual, which is a norm's to add.
    one_row = math.prod(out[:lead]) == 1
    return None if one_row and found is not None and found.aval.shape != shape else found


def _trailing(eqn: Any) -> bool:
    """Whether dims of the operand become the last ones of the result, in order."""
    new, rank = len(eqn.outvars[0].aval.shape), eqn.invars[0].aval.ndim
    return tuple(eqn.params["broadcast_dimensions"]) == tuple(range(new - rank, new))


def _activation_of(graph: Graph, var: Variable) -> tuple[str | None, list[Node]]:
    """An activation of a variable and the nodes that compute it, the last one its result."""
    if not graph.readers(var):
        return None, []
    numbers = Expressions(var.aval)
    known = {var: numbers.argument}
    made: dict[Variable, Node] = {}
    rest = graph.readers(var)
    for _ in range(_LIMIT):
        ready = [n for n in rest if n.mark is None and n.call is None]
        rest = []
        for node in ready:
            if not node.writes or node.writes[0] in known:
                continue
            _learn_constants(graph, node, numbers, known)
            results = numbers.of_equation(node.eqn, known)
            if results is None:
                continue
            known.update(zip(node.writes, results, strict=True))
            made.update(dict.fromkeys(node.writes, node))
            name = numbers.activations.get(results[0])
            if name is not None and len(node.writes) == 1:
                return name, _needed(node, made)
            rest += [r for w in node.writes for r in graph.readers(w)]
        if not rest:
            break
    return None, []


def _learn_constants(graph: Graph, node: Node, numbers: Expressions, known: dict[Any, int]) -> None:
    """Constants that are made to vary over a manual axis are variables."""
    for atom in node.reads:
        fresh = is_variable(atom) and atom not in known
        maker = graph.maker(atom) if fresh else None
        if maker is not None and not maker.writes[0].aval.shape and len(maker.reads) == 1:
            _learn_constants(graph, maker, numbers, known)
            results = numbers.of_equation(maker.eqn, known)
            known.update(zip(maker.writes, results or (), strict=False))


def _needed(last: Node, made: dict[Variable, Node]) -> list[Node]:
    """What computes a result, in order."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for atom in node.reads:
            maker = made.get(atom) if is_variable(atom) else None
            if maker is not None and maker not in found:
                visit(maker)
        found[node] = None

    visit(last)
    return list(found)
