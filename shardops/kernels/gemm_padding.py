"""Products whose rows do not begin at multiples of 16 bytes, in larger matrices whose rows do."""

from dataclasses import dataclass

import jax
import numpy as np

from shardops.kernels.gemm_layout import Layout, Operand
from shardops.kernels.sizes import round_up

_ALIGNED_BYTES = 16
# Operations a second of cuBLASLt with 16-bit operands on an H200, products of about 4100 x 4100 x
# 4100: with rows that begin at odd elements, at even ones, and at multiples of 16 bytes.
_ODD, _EVEN, _ALIGNED = 140e12, 270e12, 650e12
_COPIED = 2.5e12  # bytes read and written a second
_LAUNCH = 3e-6  # seconds


@dataclass(frozen=True)
class Padded:
    """The sizes of a product with zeros after its operands' rows and columns."""

    m: int
    n: int
    k: int

    def operands(
        self, shape: Layout, lhs: jax.Array, rhs: jax.Array
    ) -> tuple[jax.Array, jax.Array, Layout]:
        """Both operands as dense matrices, and how they are addressed."""
        arrays, sides = [], []
        for side, array, now, then in (
            (shape.lhs, lhs, (shape.m, shape.k), (self.m, self.k)),
            (shape.rhs, rhs, (shape.k, shape.n), (self.k, self.n)),
        ):
            turn = slice(None, None, -1 if side.transposed else 1)
            rows, cols = then[turn]
            array = side.stored(array).reshape(shape.batch, *now[turn])
            arrays.append(zero_padded(array, (shape.batch, rows, cols)))
            sides.append(Operand(side.transposed, cols, rows * cols))
        result = (shape.batch, self.m, self.n)
        (x, y), (a, b) = arrays, sides
        return x, y, Layout(self.m, self.n, self.k, shape.batch, a, b, result)

    def added(self, shape: Layout, add: jax.Array) -> jax.Array:
        """An array like the result."""
        return zero_padded(
            add.reshape(shape.batch, shape.m, shape.n), (shape.batch, self.m, self.n)
        )

    def bias(self, bias: jax.Array) -> jax.Array:
        return zero_padded(bias.reshape(-1), (self.n,))

    def cut(self, shape: Layout, result: jax.Array) -> jax.Array:
        """What was asked for of a result."""
        return result[:, : shape.m, : shape.n].reshape(shape.result)


def padded(shape: Layout, itemsize: int, out_itemsize: int, outs: int) -> Padded | None:
    """The sizes to pad to, None where that is of no use or takes longer than it saves.

    Args:
      itemsize: of an element of lhs and rhs; out_itemsize: of the result's.
      outs: how many arrays are like the result: itself, what is added, the pre-activation.
    """
    if itemsize != 2 or not (_dense(shape, shape.lhs) and _dense(shape, shape.rhs)):
        return None
    unit = _ALIGNED_BYTES // itemsize
    n_unit = max(1 if shape.rhs.transposed else unit, _ALIGNED_BYTES // out_itemsize)
    m = round_up(shape.m, unit if shape.lhs.transposed else 1)
    k = round_up(shape.k, 1 if shape.lhs.transposed and not shape.rhs.transposed else unit)
    n = round_up(shape.n, n_unit)
    moved = [
        count * size * (now + then)
        for count, size, now, then in (
            (1, itemsize, shape.m * shape.k, m * k),
            (1, itemsize, shape.k * shape.n, k * n),
            (outs, out_itemsize, shape.m * shape.n, m * n),
        )
        if now != then
    ]
    operations = 2 * shape.batch * shape.m * shape.n * shape.k
    slow = _ODD if any(length % 2 for length in _row_lengths(shape)) else _EVEN
    saved = operations / slow - operations / _ALIGNED
    spent = shape.batch * sum(moved) / _COPIED + len(moved) * _LAUNCH
    return Padded(m, n, k) if moved and saved > spent else None


def _row_lengths(shape: Layout) -> tuple[int, int, int]:
    """Of lhs, rhs and the result, as they lie."""
    lhs = shape.m if shape.lhs.transposed else shape.k
    return lhs, shape.k if shape.rhs.transposed else shape.n, shape.n


def _dense(shape: Layout, side: Operand) -> bool:
    """Whether its matrices, transposed first where need be, lie one row after another."""
    sizes = (shape.m, shape.k) if side is shape.lhs else (shape.k, shape.n)
    rows, cols = sizes[::-1] if side.transposed else sizes
    return side.ld == cols and (shape.batch == 1 or side.stride == rows * cols)


def zero_padded(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`array` with zeros after it in each dim."""
    if array.shape == shape:
        return array
    after = [(0, want - have, 0) for want, have in zip(shape, array.shape, strict=True)]
    return jax.lax.pad(array, np.zeros((), array.dtype), after)
