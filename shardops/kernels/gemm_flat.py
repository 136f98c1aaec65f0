"""Products of a short contraction, whose result is what moves: launch plans, pure functions."""

from dataclasses import dataclass

import numpy as np

from shardops.kernels.element_types import TYPE_CODES
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.target import Target

LONGEST = 64  # elements of the contraction: a line of rhs in shared memory
# As far as it was measured on an H200 (docs/measured.md), by the contraction: the least of rows and
# columns, and of elements of the result. Smaller ones are as fast through cuBLASLt, or faster.
_LEAST = {32: (1 << 11, 1 << 24), LONGEST: (1 << 12, 1 << 25)}
_MOST = 1 << 30

_ARCH = "sm_90"
_COLS = 128  # of a tile
_STAGES = 4
# The constants of csrc/kernels/gemm_flat.cuh.
_CONTROL = 1024
_OWN = 16 * (2 * _COLS + 16)

# `Shape` of csrc/kernels/gemm_flat.cuh.
_SHAPE = np.dtype([(name, np.int32) for name in ("m", "n", "k", "lhs_pitch", "rhs_pitch")])


@dataclass(frozen=True)
class FlatProblem:
    """out[m, n] = sum_k lhs[m, k] rhs[k, n]; all of it is static.

    Args:
      x: dtype name of all three, of 16 bits.
      lhs_turned: lhs is [k, m]; rhs_turned: rhs is [n, k].
      lhs_pitch, rhs_pitch: elements from line to line.
    """

    m: int
    n: int
    k: int
    x: str
    lhs_turned: bool
    rhs_turned: bool
    lhs_pitch: int
    rhs_pitch: int

    @property
    def shape(self) -> np.void:
        """The scalar that the kernel has for it."""
        shape = np.zeros(1, _SHAPE)
        shape[0] = (self.m, self.n, self.k, self.lhs_pitch, self.rhs_pitch)
        return shape[0]


def gains(problem: FlatProblem, target: Target) -> bool:
    """Whether the kernel takes less time than cuBLASLt."""
    p = problem
    if p.k > LONGEST or target.arch != _ARCH:
        return False
    least_side, least_result = next(least for k, least in _LEAST.items() if p.k <= k)
    sides = p.m, p.n
    return min(sides) >= least_side and p.m * p.n >= least_result and max(sides) <= _MOST


def flat_plan(problem: FlatProblem, target: Target) -> Launch:
    """Plans the launch: blocks share the tiles of the result evenly."""
    p = problem
    shortest = LONGEST if p.rhs_turned else 16
    depth = max(shortest, 1 << (p.k - 1).bit_length())
    groups = 2 if depth == LONGEST else 3  # which are the fastest
    shared = _CONTROL + _STAGES * depth * _COLS * 2 + 4 * groups * _OWN
    constants = (
        ("X_TYPE", TYPE_CODES[p.x]),
        ("LHS_TURNED", int(p.lhs_turned)),
        ("RHS_TURNED", int(p.rhs_turned)),
        ("DEPTH", depth),
        ("GROUPS", groups),
        ("STAGES", _STAGES),
        ("SHARED_BYTES", shared),
    )
    tiles = -(-p.m // (64 * groups)) * -(-p.n // _COLS)
    return Launch(
        Kernel("gemm_flat.cuh", "gemm_flat", constants),
        (min(tiles, target.sm_count), 1, 1),
        (128 * (groups + 1), 1, 1),
        shared_bytes=shared,
        align=16,
    )
