"""Small products, of which most of the time is the launch: launch plans, pure functions."""

from shardops.kernels.element_types import TYPE_CODES
from shardops.kernels.gemm_flat import FlatProblem
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.target import Target

# Elements of the contraction, all of which are in shared memory at once, and tiles of the result,
# up to which the kernel takes no longer than cuBLASLt's on an H200 (docs/measured.md). Calling it
# takes less of the host's time at any size.
LONGEST = 256
_MOST_TILES = 64

_ARCH = "sm_90"
# The constants of csrc/kernels/gemm_small.cuh.
_TILE = 32
_CHUNK = 64
_CONTROL = 128
_PAD = 16  # bytes after a line in shared memory


def gains(problem: FlatProblem, target: Target) -> bool:
    """Whether the kernel takes less time than cuBLASLt, the call included."""
    across, down = _tiles(problem)
    small = across * down <= _MOST_TILES and problem.k <= LONGEST
    return small and target.arch == _ARCH


def small_plan(problem: FlatProblem) -> Launch:
    """Plans the launch: a block a tile of the result."""
    p = problem
    depth = -(-p.k // _CHUNK) * _CHUNK
    along, across = _TILE * (2 * depth + _PAD), depth * (2 * _TILE + _PAD)
    shared = _CONTROL + (across if p.lhs_turned else along) + (along if p.rhs_turned else across)
    constants = (
        ("X_TYPE", TYPE_CODES[p.x]),
        ("LHS_TURNED", int(p.lhs_turned)),
        ("RHS_TURNED", int(p.rhs_turned)),
        ("MOST_CHUNKS", LONGEST // _CHUNK),
    )
    return Launch(
        Kernel("gemm_small.cuh", "gemm_small", constants),
        (*_tiles(p), 1),
        (128, 1, 1),
        shared_bytes=shared,
        early=True,
        align=16,
    )


def _tiles(problem: FlatProblem) -> tuple[int, int]:
    """Across the result, and down it."""
    return -(-problem.n // _TILE), -(-problem.m // _TILE)
