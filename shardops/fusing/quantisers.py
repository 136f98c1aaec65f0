"""What quantises a norm's result: `so.quantize`, which it can do itself, or equations."""

from dataclasses import dataclass
from typing import Any

from shardops.fusing.graph import Graph, Node, Variable
from shardops.primitives.quantize import Straight
from shardops.primitives.quantize_op import QuantizeOp
from shardops.primitives.scaling import ScalingMode

_QUANTISING = ("convert_element_type", "mul", "div", "max", "min", "clamp", "jit", "pjit")
_DEEPEST = 6  # equations between a norm and an array of 8 bits


@dataclass(frozen=True)
class Quantiser:
    """The call of `so.quantize` that takes a norm's result.

    Attributes:
      nodes: the call, and the use of the result that is for its cotangent alone.
      form: what is static of it.
      scale: operands that it has besides the norm's result: its scale, or none.
    """

    nodes: tuple[Node, ...]
    form: Any
    scale: tuple[Any, ...]

    @property
    def writes(self) -> tuple[Variable, ...]:
        """The variables that it makes: parts of a ScaledArray, then its `straight`."""
        return tuple(v for node in self.nodes for v in node.writes)


def quantiser_of(graph: Graph, norm: Node, x: Variable) -> Quantiser | str | None:
    """The quantiser that a norm of x can be given; why none, where there is one; or None."""
    y = norm.writes[0]
    readers = graph.readers(y)
    calls = [(r, r.mark.op) for r in readers if r.mark and isinstance(r.mark.op, QuantizeOp)]
    if not calls:
        dtype = _by_equations(graph, y)
        return dtype and f"its result is quantised to {dtype} by equations of its own"
    if len(calls) > 1:
        return "its result is quantised more than once"
    ((call, op),) = calls
    form = op.form
    if form.mode is ScalingMode.TENSOR_CURRENT:
        return "its result is quantised by its own largest magnitude, which has to be there first"
    straight = [r for r in readers if r.mark and isinstance(r.mark.op, Straight)]
    others = [f"used by `{r.name}`" for r in readers if r is not call and r not in straight]
    if y in graph.returned or others:
        return (
            f"its result is quantised, and also {'returned' if y in graph.returned else others[0]}"
        )
    scale = call.reads[1:]
    makers = {maker for s in scale if (maker := graph.maker(s)) is not None}
    needed = makers.union(*(graph.before(m) for m in makers))
    if needed & {norm, *(r for r in graph.readers(x) if r is not norm)}:
        return "its quantiser is made from what it normalises"
    return Quantiser((call, *straight), form, scale)


def _by_equations(graph: Graph, y: Variable) -> str | None:
    """The 8-bit dtype that a norm's result is brought to at once; None where it is not.

    Here the equations between are found that a norm with `quantizer=` does by itself.
    """
    rest = [(y, 0)]
    while rest:
        var, depth = rest.pop()
        for reader in graph.readers(var) if depth < _DEEPEST else []:
            if reader.name not in _QUANTISING or len(reader.writes) != 1:
                continue
            (out,) = reader.writes
            if out.aval.shape == y.aval.shape and out.aval.dtype.itemsize == 1:
                return out.aval.dtype.name
            rest.append((out, depth + 1))
    return None
