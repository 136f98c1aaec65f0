"""Norm problems that the kernel tests share, and the arrays that go with them."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from shardops.kernels.norm_problem import NormProblem

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NAMES = tuple(DTYPES)


@dataclass(frozen=True)
class Arrays:
    """Operands of a forward and a backward pass; an absent one is None."""

    x: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray | None
    add: np.ndarray | None
    dy: np.ndarray
    dh: np.ndarray | None


def random_arrays(problem: NormProblem, rng: np.random.Generator, offset: int = 0) -> Arrays:
    """Draws operands; with an offset none of them starts on more than an element's boundary."""

    def draw(shape, dtype):
        count = int(np.prod(shape))
        padded = np.full(count + offset, np.nan, DTYPES[dtype])
        padded[offset:] = (rng.standard_normal(count) + 0.5).astype(DTYPES[dtype])
        return padded[offset:].reshape(shape)

    rows, row = (problem.rows, problem.cols), (problem.cols,)
    return Arrays(
        x=draw(rows, problem.x),
        gamma=draw(row, problem.gamma),
        beta=None if problem.beta is None else draw(row, problem.beta),
        add=draw(rows, problem.x) if problem.add else None,
        dy=draw(rows, problem.x),
        dh=draw(rows, problem.x) if problem.add else None,
    )


def blank(shape: tuple[int, ...], dtype: str, offset: int = 0) -> np.ndarray:
    """An array of NaN: what a kernel leaves out shows."""
    padded = np.full(int(np.prod(shape)) + offset, np.nan, DTYPES[dtype])
    return padded[offset:].reshape(shape)
