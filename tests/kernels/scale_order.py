"""The order in which cuBLASLt reads scales of 32 elements, by its documentation, and operands."""

import itertools
from collections.abc import Iterator
from math import prod

import numpy as np

from shardops.kernels.gemm_scaled_plan import Matrix, ScaleMode

# Shapes of scales, the order of their dims in [rows, blocks], and how many of these are blocks:
# whole tiles; words, halves of words and bytes along a row; one scale; longer than a block's share;
# turned; rows and blocks of several dims, in order and not.
CASES = (
    ((256, 16), (0, 1), 1),
    ((130, 20), (0, 1), 1),
    ((45, 6), (0, 1), 1),
    ((129, 33), (0, 1), 1),
    ((1, 1), (0, 1), 1),
    ((300, 272), (0, 1), 1),
    ((33, 140), (1, 0), 1),
    ((2, 70, 8), (0, 1, 2), 1),
    ((6, 70, 8), (1, 0, 2), 2),
    ((3, 4, 5, 6), (1, 3, 0, 2), 2),
    ((2, 3, 4, 5, 3), (0, 2, 4, 1, 3), 2),
)


def operand(shape: tuple[int, ...], order: tuple[int, ...], contracted: int) -> Matrix:
    """That has these scales."""
    sizes = [shape[d] for d in order]
    k = 32 * prod(sizes[-contracted:])
    return Matrix(order, contracted, 1, prod(sizes[:-contracted]), k, ScaleMode.VEC_32)


def operands(rng: np.random.Generator, more: int = 0) -> Iterator[list[tuple[Matrix, np.ndarray]]]:
    """Pairs of operands and codes: each case beside the one after it, and `more` that are drawn."""
    cases = list(CASES)
    for _ in range(more):
        dims = int(rng.integers(2, 6))
        shape = tuple(int(2 ** rng.uniform(0, 12 / dims)) for _ in range(dims))
        cases.append((shape, tuple(rng.permutation(dims).tolist()), int(rng.integers(1, dims))))
    for pair in itertools.pairwise((*cases, cases[0])):
        yield [(operand(*case), rng.integers(0, 255, case[0], np.uint8)) for case in pair]


def in_tiles(matrix: Matrix, codes: np.ndarray) -> np.ndarray:
    """Row r, block b at [r / 128, b / 4, r % 32, r / 32 % 4, b % 4]; others are 0."""
    scales = codes.transpose(matrix.order).reshape(matrix.rows, -1)
    rows, blocks = scales.shape
    tiles = np.zeros((-(-rows // 128), -(-blocks // 4), 32, 4, 4), codes.dtype)
    r, b = np.indices(scales.shape)
    tiles[r // 128, b // 4, r % 32, r // 32 % 4, b % 4] = scales
    return tiles
