"""What the launch plans of softmax depend on."""

import math
from dataclasses import dataclass
from typing import Literal

from shardops.kernels.element_types import TYPE_BYTES

MAX_MASK_DIGITS = 3  # what the kernels' Params have room for
MAX_KEYS = 2**30  # columns are counted in 32 bits, some of them past the row's end

MaskKind = Literal[0, 1, 2]  # none; a byte a key; a byte a row


@dataclass(frozen=True)
class SoftmaxProblem:
    """What a softmax's launch depends on; all of it is static.

    Args:
      rows: queries, over all batch entries.
      x: dtype name.
      mask, digits: which kind, and how many digits make up its row (see `mask_rows`).
      causal: later keys are hidden; first: and an operand says which query row 0 is.
      sign: of the scale, -1, 0 or 1.
    """

    rows: int
    keys: int
    x: str
    mask: MaskKind = 0
    digits: int = 0
    causal: bool = False
    first: bool = False
    sign: int = 1

    @property
    def vector(self) -> int:
        """Elements in a 16-byte word."""
        return 16 // TYPE_BYTES[self.x]

    @property
    def even(self) -> bool:
        """Whether every row is whole words; else one more may cover it, as it lies."""
        return self.keys % self.vector == 0

    @property
    def whole_words(self) -> int:
        """The most 16-byte words that lie in a row as a whole."""
        return self.keys // self.vector

    @property
    def words(self) -> int:
        """The most words that cover a row."""
        spare = 0 if self.even else self.vector - 1
        return -(-(self.keys + spare) // self.vector)


def rows_to_next_place(problem: SoftmaxProblem) -> int:
    """After so many rows, one starts again at the same place of a word of 16 bytes."""
    return problem.vector // math.gcd(problem.vector, problem.keys)


def mask_rows(shape: tuple[int, ...], mask: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Which row of a mask goes with a row of x: digits of the row's number, most significant first.

    Args:
      shape, mask: the dims before the keys; each of the mask's is 1 or that of x.
    Returns: (rows of x below the digit, its values) pairs: the digit is row // below % values.
    """
    digits: list[tuple[int, int]] = []
    below = 1
    joins = False  # the dim to the right belongs to the last digit
    for size, own in zip(reversed(shape), reversed(mask), strict=True):
        if size == 1:
            continue
        if own != 1 and joins:
            digits[-1] = (digits[-1][0], digits[-1][1] * size)
        elif own != 1:
            digits.append((below, size))
        joins = own != 1
        below *= size
    return tuple(reversed(digits))
