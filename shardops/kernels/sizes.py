"""Arithmetic of sizes that plans share."""

from collections.abc import Sequence

# Multiprocessors of GPUs and of their slices, and some between, that packs are planned for. Where
# a kernel is made for a number of blocks that follows from the multiprocessors, it is one of these
# or of the second ones: a pack has them all, and serves GPUs of any size. Of 5 a row is one of few.
SM_COUNTS = (1, 2, 4, 5, 8, 16, 32, 48, 60, 64, 78, 92, 108, 114, 120, 128, 132, 144, 148, 160, 192)
# That share a row, a fifth fewer at most than there is room for.
BLOCKS_OF_A_ROW = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)

# Bytes of x a multiprocessor, up to which a launch is one of few rows: memory would move them in a
# few microseconds, and more of the time goes by until the first rows are there.
SMALL = 64 << 10


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def at_most(value: int, numbers: Sequence[int]) -> int:
    """The greatest of the numbers that is not above `value`; 1 is one of them."""
    return max(n for n in numbers if n <= value)
