"""How cuBLASLt addresses the operands of a product: pure functions of shapes."""

import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

Dims = tuple[int, ...]
DimPair = tuple[Dims, Dims]


@dataclass(frozen=True)
class Operand:
    """An array as a batch of row-major matrices.

    Args:
      transposed: lhs: rows run over contracting dims. rhs: rows run over free dims.
      ld: elements from one row to the next.
      stride: elements from one matrix to the next.
      permutation: None, or the transposition of the array that must come first.
    """

    transposed: bool
    ld: int
    stride: int
    permutation: Dims | None = None

    def stored(self, array: jax.Array) -> jax.Array:
        """The array as the matrices want it."""
        return array if self.permutation is None else jnp.transpose(array, self.permutation)


@dataclass(frozen=True)
class Layout:
    """out[batch, m, n] = sum_k lhs[batch, m, k] rhs[batch, k, n], and the shape of the result."""

    m: int
    n: int
    k: int
    batch: int
    lhs: Operand
    rhs: Operand
    result: Dims


def layout(
    lhs_shape: Dims,
    rhs_shape: Dims,
    contracting: tuple[Dims, Dims],
    batch: tuple[Dims, Dims],
) -> Layout:
    """Finds matrices in the operands, with as few elements as possible to be transposed first.

    Dims next to each other that belong together are one. The order in which contracting dims are
    summed over is free, as long as it is the same on both sides.
    """
    lhs_free, rhs_free = (
        tuple(d for d in range(len(shape)) if d not in (*contracting[i], *batch[i]))
        for i, shape in enumerate((lhs_shape, rhs_shape))
    )
    pairs = list(zip(*contracting, strict=True))

    def operands(order: list[tuple[int, int]]) -> tuple[Operand, Operand]:
        return (
            _operand(lhs_shape, batch[0], rows=lhs_free, cols=tuple(p[0] for p in order)),
            _operand(rhs_shape, batch[1], rows=tuple(p[1] for p in order), cols=rhs_free),
        )

    lhs, rhs = min(
        (operands(order) for order in (pairs, sorted(pairs), sorted(pairs, key=lambda p: p[1]))),
        key=lambda found: _moved(found[0], lhs_shape) + _moved(found[1], rhs_shape),
    )
    return Layout(
        m=math.prod(lhs_shape[d] for d in lhs_free),
        n=math.prod(rhs_shape[d] for d in rhs_free),
        k=math.prod(lhs_shape[d] for d in contracting[0]),
        batch=math.prod(lhs_shape[d] for d in batch[0]),
        lhs=lhs,
        rhs=rhs,
        result=tuple(
            itertools.chain(
                (lhs_shape[d] for d in batch[0]),
                (lhs_shape[d] for d in lhs_free),
                (rhs_shape[d] for d in rhs_free),
            )
        ),
    )


def _moved(operand: Operand, shape: Dims) -> int:
    return 0 if operand.permutation is None else math.prod(shape)


def _operand(shape: Dims, batch: Dims, rows: Dims, cols: Dims) -> Operand:
    """An operand that is [batch, rows, cols] unless it is transposed."""
    found = _in_place(shape, batch, rows, cols)
    if found is not None:
        return found
    # The dim that was fastest stays the fastest: such a transposition moves whole lines.
    fastest = max(d for d in range(len(shape)) if shape[d] > 1)
    order = (*batch, *cols, *rows) if fastest in rows else (*batch, *rows, *cols)
    moved = tuple(shape[d] for d in order)
    b, r, c = (tuple(order.index(d) for d in dims) for dims in (batch, rows, cols))
    found = _in_place(moved, b, r, c)
    assert found is not None  # each group is one run of dims now
    return Operand(found.transposed, found.ld, found.stride, order)


def _in_place(shape: Dims, batch: Dims, rows: Dims, cols: Dims) -> Operand | None:
    groups = [_collapse(shape, dims) for dims in (batch, rows, cols)]
    if None in groups:
        return None
    (_, b_stride), (r_size, r_stride), (c_size, c_stride) = (g for g in groups if g is not None)
    found = []
    if c_stride in (0, 1):  # [rows, cols]
        found.append((c_size, Operand(False, max(r_stride, c_size), b_stride)))
    if r_stride in (0, 1):  # [cols, rows]
        found.append((r_size, Operand(True, max(c_stride, r_size), b_stride)))
    # Both will do where one of the two is a single row or column: long rows are read faster.
    return max(found, key=lambda entry: entry[0])[1] if found else None


def _collapse(shape: Dims, dims: Dims) -> tuple[int, int] | None:
    """Size and stride of dims taken as one, None where they are not evenly spaced.

    The stride is 0 where there is one element.
    """
    size, stride = 1, 0
    for d in reversed(dims):
        if shape[d] == 1:
            continue
        step = math.prod(shape[d + 1 :])
        if size > 1 and step != size * stride:
            return None
        stride = stride if size > 1 else step
        size *= shape[d]
    return size, stride
