"""Products of short contractions, their operands, and what must come out, in float64."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from shardops.kernels.gemm_flat import FlatProblem

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TURNS = [(lhs, rhs) for lhs in (False, True) for rhs in (False, True)]


@dataclass(frozen=True)
class Drawn:
    """A problem, operands that lie as it says, and their product in float64."""

    problem: FlatProblem
    lhs: np.ndarray
    rhs: np.ndarray
    want: np.ndarray


def draw(
    rng: np.random.Generator, m: int, n: int, k: int, x: str, lhs_turned: bool, rhs_turned: bool
) -> Drawn:
    lhs = rng.standard_normal((k, m) if lhs_turned else (m, k)).astype(DTYPES[x])
    rhs = rng.standard_normal((n, k) if rhs_turned else (k, n)).astype(DTYPES[x])
    problem = FlatProblem(m, n, k, x, lhs_turned, rhs_turned, lhs.shape[1], rhs.shape[1])
    a, b = lhs.astype(np.float64), rhs.astype(np.float64)
    want = (a.T if lhs_turned else a) @ (b.T if rhs_turned else b)
    return Drawn(problem, lhs, rhs, want)
