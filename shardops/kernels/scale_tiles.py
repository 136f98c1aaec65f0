"""Scales of 32 elements in the order in which cuBLASLt reads them.

Tiles of 128 rows by 4 blocks lie one after the other; in one, rows 32 apart lie side by side. Each
product brings the scales of both its operands there by one launch, wherever they come from.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import launch
from shardops.kernels.gemm_scaled_plan import Matrix
from shardops.kernels.launch import Kernel, Launch

ROWS, BLOCKS = 128, 4
_THREADS, _STRIP = 128, 64  # of a block: threads, blocks of scales along a row
_DIGITS = (1, 4)  # that kernels are made for
Dims = tuple[int, ...]
Digits = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Scales:
    """Those of an operand, as they are read.

    Args:
      rows, blocks: sizes and strides of the dims that either is made of, from major to minor.
    """

    rows: Digits
    blocks: Digits

    @classmethod
    def of(cls, shape: Dims, matrix: Matrix) -> "Scales":
        """Of an array of this shape, in row-major order, beside the data that `matrix` is of."""
        last = len(shape) - matrix.contracted
        return cls(_digits(shape, matrix.order[:last]), _digits(shape, matrix.order[last:]))

    @property
    def counts(self) -> tuple[int, int]:
        rows, blocks = (prod(size for size, _ in digits) for digits in (self.rows, self.blocks))
        return rows, blocks

    @property
    def digits(self) -> int:
        return max(len(self.rows), len(self.blocks))

    @property
    def thread_blocks(self) -> int:
        rows, blocks = self.counts
        return -(-rows // ROWS) * -(-blocks // _STRIP)

    def scalar(self, digits: int) -> np.void:
        """`Scales` of csrc/kernels/scale_tiles.cuh, with so many digits."""
        index = np.dtype([("size", np.uint32, digits), ("stride", np.int64, digits)], align=True)
        fields = [
            ("row_count", np.uint32),
            ("block_count", np.uint32),
            ("rows", index),
            ("blocks", index),
            ("thread_blocks", np.uint32),
        ]
        scalar = np.zeros(1, np.dtype(fields, align=True))
        scalar["row_count"], scalar["block_count"] = self.counts
        for name, found in (("rows", self.rows), ("blocks", self.blocks)):
            filled = ((1, 0),) * (digits - len(found)) + found
            scalar[name]["size"], scalar[name]["stride"] = np.transpose(filled)
        scalar["thread_blocks"] = self.thread_blocks
        return scalar[0]


def shape_of(rows: int, blocks: int) -> Dims:
    """The shape of scales [rows, blocks] in tiles, of which the last ones are filled up."""
    return (-(-rows // ROWS), -(-blocks // BLOCKS), 32, 4, BLOCKS)


def in_order(rows: int, blocks: int) -> Scales:
    """Of an array [rows, blocks]."""
    return Scales(((rows, blocks),), ((blocks, 1),))


def tiles_launch(lhs: Scales, rhs: Scales) -> Launch:
    """Plans the launch for the scales of two operands."""
    return Launch(
        Kernel("scale_tiles.cuh", "scale_tiles", (("DIGITS", _digits_of(lhs, rhs)),)),
        (lhs.thread_blocks + rhs.thread_blocks, 1, 1),
        (_THREADS, 1, 1),
    )


def tiles_plan(lhs: Scales, rhs: Scales) -> tuple[Launch, list[np.void]]:
    """`tiles_launch`, and its scalars."""
    digits = _digits_of(lhs, rhs)
    return tiles_launch(lhs, rhs), [lhs.scalar(digits), rhs.scalar(digits)]


def tiled(*operands: tuple[Matrix, jax.Array]) -> tuple[jax.Array, ...]:
    """The scales of lhs and of rhs as cuBLASLt reads them: called while JAX lowers."""
    arrays, found = [], []
    for matrix, scales in operands:
        of = Scales.of(scales.shape, matrix)
        if of.digits > _DIGITS[-1]:
            scales = jnp.transpose(scales, matrix.order).reshape(of.counts)
            of = in_order(*of.counts)
        arrays.append(scales)
        found.append(of)
    plan, scalars = tiles_plan(*found)
    results = [jax.ShapeDtypeStruct(shape_of(*of.counts), jnp.float8_e8m0fnu) for of in found]
    return launch.call(plan, arrays, results, scalars)


def _digits_of(lhs: Scales, rhs: Scales) -> int:
    """How many digits the kernel for both has."""
    return next(n for n in _DIGITS if n >= max(lhs.digits, rhs.digits))


def _digits(shape: Dims, dims: Dims) -> Digits:
    """Sizes and strides of dims; those that lie one after the other are one."""
    found: list[tuple[int, int]] = []
    for dim in dims:
        size, stride = shape[dim], prod(shape[dim + 1 :])
        if found and found[-1][1] == size * stride:
            size *= found.pop()[0]
        if size > 1:
            found.append((size, stride))
    return tuple(found) or ((1, 1),)
