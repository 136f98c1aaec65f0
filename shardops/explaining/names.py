"""What a report calls the operands, the results and their dims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardops.explaining.products import Gradient
from shardops.op import Op, Shapes
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import ScaledGemmOp
from shardops.primitives.norm_op import NormBackward, NormForward
from shardops.primitives.quantize_op import MagnitudesOp, QuantizeOp
from shardops.primitives.quantize_op import result_shapes as quantised_shapes
from shardops.primitives.row_sum import RowSumOp

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Array:
    """An operand or a result: its name, and the names of its dims."""

    name: str
    dims: Dims


@dataclass(frozen=True)
class Names:
    """Of one call. Dims of equal name are the same loop, so that they have one size."""

    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    keys: Mapping[str, Array]  # what steps call an array -> the array

    def called(self, array: str) -> Array:
        """The array that a step means."""
        return self.keys.get(array) or Array(array or "an operand", ())


def names(
    op: Op, shapes: Shapes, gradient: Gradient = "", letters: tuple[Dims, Dims] | None = None
) -> Names:
    """Names of a call's arrays.

    Args:
      op: the op as it was called.
      shapes: of its operands.
      gradient: of a product, which operand's cotangent it gives.
      letters: of a product, the names of the dims of both operands: those of an einsum.
    """
    if isinstance(op, GemmOp):
        operands, results = _of_product(op, shapes, gradient, letters)
    elif isinstance(op, ScaledGemmOp):
        operands, results = _of_scaled_product(op, shapes, gradient, letters)
    elif isinstance(op, NormForward | NormBackward):
        operands, results = _of_norm(op, shapes)
    elif isinstance(op, RowSumOp):
        kept, summed = _numbered("C", op.kept), _numbered("R", op.rows)
        rest = _numbered("N", len(shapes[0]) - op.kept - op.rows)
        operands, results = [Array("x", kept + summed + rest)], [Array("sum", kept + rest)]
    else:
        operands, results = _of_factors(op, shapes)
    keys = dict(zip(op.operands, operands, strict=True))
    keys |= {"out": results[0], "result": results[0]}
    keys |= {a.name: a for a in results if a.name in ("data", "transposed data", "amax")}
    if isinstance(op, MagnitudesOp):
        keys |= {"amax": Array("amax", operands[0].dims[: op.added])}
    if isinstance(op, NormForward | NormBackward):
        rows, hidden = results[0].dims[:-1], results[0].dims[-1:]
        keys |= {"statistics": Array("statistics", rows)}
        keys |= {"parameter": Array("the parameters' gradients", hidden)}
    return Names(tuple(operands), tuple(results), keys)


Arrays = tuple[list[Array], list[Array]]  # operands, results


def result_shapes(named: Names, shapes: Shapes, op: Op | None = None) -> Shapes:
    """Shapes of the results, from those of the operands."""
    if isinstance(op, QuantizeOp | MagnitudesOp):
        return op.result_shapes(shapes)
    if isinstance(op, NormForward) and op.form is not None:
        rows = len(named.results) - len(op.form.results)
        own = {"h": shapes[0]}
        rest = tuple(own.get(a.name, shapes[0][:-1]) for a in named.results[-rows:])
        return (*quantised_shapes(op.form, shapes[0]), *rest)
    pairs = zip(named.operands, shapes, strict=True)
    sizes = {d: n for a, shape in pairs for d, n in zip(a.dims, shape, strict=True)}
    return tuple(tuple(sizes[d] for d in a.dims) for a in named.results)


def _of_product(
    op: GemmOp, shapes: Shapes, gradient: Gradient, letters: tuple[Dims, Dims] | None
) -> Arrays:
    dims = op.dims(shapes)
    free, contracted, other = {"lhs": "MNK", "rhs": "KMN"}.get(gradient, "MKN")
    if letters is None:
        left, right = [""] * len(dims.lhs_shape), [""] * len(dims.rhs_shape)
        _fill(left, dims.lhs_free, free)
        _fill(right, dims.rhs_free, other)
        for at, numbered in ((dims.lhs_k, contracted), (dims.lhs_batch, "B")):
            _fill(left, at, numbered)
        for at, numbered in ((dims.rhs_k, contracted), (dims.rhs_batch, "B")):
            _fill(right, at, numbered)
        letters = tuple(left), tuple(right)
    lhs, rhs = letters
    calls = {"lhs": ("dout", "rhs", "dlhs"), "rhs": ("lhs", "dout", "drhs")}
    first, second, result = calls.get(gradient, ("lhs", "rhs", "out"))
    out = dims.to_out(lhs, rhs)
    operands = [Array(first, lhs), Array(second, rhs)]
    if op.bias:
        operands.append(Array("bias", tuple(rhs[j] for j in dims.rhs_free)))
    if op.add:
        operands.append(Array("add", out))
    results = [Array(result, out)] + [Array("pre-activation", out)] * op.save
    return operands, results


def _of_scaled_product(
    op: ScaledGemmOp, shapes: Shapes, gradient: Gradient, letters: tuple[Dims, Dims] | None
) -> Arrays:
    """Scales beside their operand; their dims count blocks."""
    lhs, rhs, rest = op.sides(shapes)
    whole = (lhs[0], rhs[0], *rest)
    (of_lhs, of_rhs, *others), results = _of_product(op.product, whole, gradient, letters)
    operands = []
    for data, scales in ((of_lhs, lhs[1:]), (of_rhs, rhs[1:])):
        operands.append(data)
        blocks = tuple(f"{d} blocks" for d in data.dims)
        operands += [Array(f"{data.name} scales", blocks[: len(shape)]) for shape in scales]
    return [*operands, *others], results


def _fill(target: list[str], at: Sequence[int], prefix: str) -> None:
    for d, name in zip(at, _numbered(prefix, len(at)), strict=True):
        target[d] = name


def _numbered(prefix: str, count: int) -> Dims:
    """M for one dim, M0, M1, … for more."""
    return (prefix,) if count == 1 else tuple(f"{prefix}{n}" for n in range(count))


def _of_norm(op: NormForward | NormBackward, shapes: Shapes) -> Arrays:
    at = op.operands.index("x" if isinstance(op, NormForward) else "h")
    rows = _numbered("R", len(shapes[at]) - 1)
    vectors, statistics = ("gamma", "beta", "dgamma", "dbeta"), ("mean", "rstd")
    added = 0
    if isinstance(op, NormForward):
        added = 0 if op.form is None else op.form.blocks.added
        written = ["y"] if op.form is None else op.form.results
        results = [*written, *["h"] * op.add, *["mean"] * (op.kind == "layer"), "rstd"]
    else:
        results = ["dx", "dgamma", *["dbeta"] * op.beta]

    def array(name: str) -> Array:
        if name in ("scale_inv", "amax"):
            return Array(name, rows[:added])
        if name.startswith("transposed"):
            return Array(name, (*rows[:added], "H", *rows[added:]))
        return Array(name, ("H",) if name in vectors else rows + ("H",) * (name not in statistics))

    return [array(n) for n in op.operands], [array(n) for n in results]


def _of_factors(op: Op, shapes: Shapes) -> Arrays:
    """Another op: dims by the names of its own rule."""
    ins, outs = op.factors(shapes)
    known = {d for one in ins for d in one}
    results = ["out"] if len(outs) == 1 else [f"out{n}" for n in range(len(outs))]
    if isinstance(op, QuantizeOp):
        results = list(op.form.results)
    if isinstance(op, MagnitudesOp):
        results = ["magnitudes"]
    # A result's dim that no operand names stands where the first operand has its dim.
    dims = [[d if d in known else ins[0][at] for at, d in enumerate(one)] for one in outs]
    return (
        [Array(n, tuple(d)) for n, d in zip(op.operands, ins, strict=True)],
        [Array(n, tuple(d)) for n, d in zip(results, dims, strict=True)],
    )
