"""The rules in Shardy's notation: which dims of operands and results are the same loop.

Only propagation reads them. What is moved and summed is decided by the plans. No factor is called
a reduction: that inserts nothing.
"""

from collections.abc import Sequence

from shardops.rules.gemm_dims import GemmDims

Factors = list[list[str]]


def gemm_factors(dims: GemmDims, *, bias: bool, add: bool, results: int) -> tuple[Factors, Factors]:
    """Factor names of operands and results: `b0 l0 k0, b0 k0 r0 -> b0 l0 r0` and the like.

    A bias has factors of its own: it is little, and its sharding is no reason to move a product.
    """
    lhs = [f"l{i}" for i in range(len(dims.lhs_shape))]
    rhs = [f"r{j}" for j in range(len(dims.rhs_shape))]
    for n, (i, j) in enumerate(zip(dims.lhs_k, dims.rhs_k, strict=True)):
        lhs[i] = rhs[j] = f"k{n}"
    for n, (i, j) in enumerate(zip(dims.lhs_batch, dims.rhs_batch, strict=True)):
        lhs[i] = rhs[j] = f"b{n}"
    out = list(dims.to_out(lhs, rhs))
    operands = [lhs, rhs]
    if bias:
        operands.append([f"c{j}" for j in dims.rhs_free])
    if add:
        operands.append(out)
    return operands, [out] * results


def rule(operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]]) -> str:
    """Factor names a dim -> Shardy's text."""

    def side(values: Sequence[Sequence[str]]) -> str:
        return ", ".join(" ".join(v) for v in values)

    return f"{side(operands)} -> {side(results)}"
