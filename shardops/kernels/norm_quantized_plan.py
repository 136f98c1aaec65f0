"""Launch plans of the norms with quantised results: pure functions of shapes, types and the GPU.

Rows alone come from the registers that hold a row. Columns need tiles of many rows: one launch in
which some blocks find statistics and others, behind them, quantise tiles. So do rows that are too
long for registers, or whose blocks of scales do not lie in a warp.
"""

from dataclasses import dataclass

import numpy as np

from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of, round_up
from shardops.kernels.quantize_plan import (
    SHAPE,
    TILE,
    TILE_THREADS,
    QuantizeProblem,
    converts,
    written_arrays,
    written_constants,
)
from shardops.kernels.target import Target

# Of csrc/kernels/norm_quantized_tiles.cuh.
PARAMS = np.dtype(
    [("shape", SHAPE), ("slabs", np.uint32), ("ahead", np.uint32), ("epsilon", np.float32)],
    align=True,
)
_MIN_BLOCKS = 2
_MOST_ROWS = 16  # whose statistics one block finds


@dataclass(frozen=True)
class QuantizedNorm:
    """A norm and what is written of it; `written` None: y in float32."""

    norm: NormProblem
    written: QuantizeProblem | None


@dataclass(frozen=True)
class RowGeometry:
    """How a block's threads lie over rows."""

    threads_per_row: int
    rows_per_block: int
    min_blocks: int


def row_geometry(problem: QuantizedNorm) -> RowGeometry | None:
    """For rows in registers; None where they do not fit, or more than rows are wanted."""
    norm, written = problem.norm, problem.written
    lanes = 1
    if written is not None:
        if written.as_columns or written.scales == "square":
            return None
        lanes = max(1, written.block // norm.vector)
        if lanes > 32:
            return None
    each = norm.registers(norm.x)
    for held in (16, 32):  # registers of a row that a thread holds
        per_thread = max(1, held // each)
        if norm.vectors <= 32 * per_thread:
            threads = max(lanes, 1 << (-(-norm.vectors // per_thread) - 1).bit_length())
        else:
            threads = round_up(-(-norm.vectors // per_thread), 32)
        if threads <= (1024 if held == 16 else 512):
            rows = max(1, 128 // threads)
            resident = (1024 if held == 16 else 512) // (1 + norm.add)
            return RowGeometry(threads, rows, max(1, resident // (threads * rows)))
    return None


def quantized_forward_plan(
    problem: QuantizedNorm, target: Target, geometry: RowGeometry | None = None
) -> Launch | None:
    """Plans the launch; None for y in float32 of rows too long for registers.

    Args:
      problem: what is written is arranged by `joined`.
      geometry: overrides the one chosen for rows in registers, for tuning.

    Results: those of `written` (`quantize_plan`), or y; h, mean, rstd; of tiles then a counter a
    slab.
    """
    geometry = geometry or row_geometry(problem)
    if geometry is not None:
        return _rows(problem, geometry)
    return None if problem.written is None else _tiles(problem, problem.written, target)


def params_of(problem: QuantizeProblem, epsilon: float, target: Target) -> np.void:
    """The scalars of the launch of tiles."""
    ahead = slabs_ahead(problem, target)
    params = np.zeros(1, PARAMS)
    params[0] = (problem.shape, problem.slabs, ahead, epsilon)
    return params[0]


def statistics_rows(cols: int) -> int:
    """Rows whose statistics a block finds: it reads as much as one that quantises a tile."""
    rows = 1
    while rows < _MOST_ROWS and 2 * rows * cols <= TILE * TILE:
        rows *= 2
    return rows


def slabs_ahead(problem: QuantizeProblem, target: Target) -> int:
    """Statistics are found by blocks that have ended before those that need them start.

    As many blocks as are resident at once lie between the two, and a slab more.
    """
    resident = target.sm_count * _MIN_BLOCKS
    return min(problem.slabs, -(-resident // _blocks_of_slab(problem)) + 1)


def _blocks_of_slab(problem: QuantizeProblem) -> int:
    return TILE // statistics_rows(problem.cols) + -(-problem.cols // TILE)


def _rows(problem: QuantizedNorm, geometry: RowGeometry) -> Launch:
    norm, written = problem.norm, problem.written
    own = (("FORMAT", 0), ("SCALES", 0), ("AMAX", 0))
    if written is not None:
        own = tuple(c for c in written_constants(written) if c[0] not in ("ROWS", "COLUMNS"))
    constants = (
        *constants_of(norm),
        *own,
        ("WIDE", int(written is None)),
        ("THREADS_PER_ROW", geometry.threads_per_row),
        ("ROWS_PER_BLOCK", geometry.rows_per_block),
        ("MIN_BLOCKS", geometry.min_blocks),
    )
    amax = written is not None and written.amax
    return Launch(
        Kernel("norm_quantized.cuh", "norm_quantized", constants),
        (-(-norm.rows // geometry.rows_per_block), 1, 1),
        (geometry.threads_per_row, geometry.rows_per_block, 1),
        zeroed=(1,) * amax,
    )


def _tiles(problem: QuantizedNorm, written: QuantizeProblem, target: Target) -> Launch:
    norm = problem.norm
    constants = (
        *(c for c in constants_of(norm) if c[0] not in ("COLS", "VECTOR")),
        *written_constants(written),
        ("EVEN", int(norm.cols % 8 == 0)),
        ("STAT_ROWS", statistics_rows(norm.cols)),
        ("MIN_BLOCKS", 1 if norm.x == "float32" and not converts(target) else _MIN_BLOCKS),
    )
    before = written_arrays(written)
    ready = before + written.amax + norm.add + (norm.kind == "layer") + 1
    return Launch(
        Kernel("norm_quantized_tiles.cuh", "norm_quantized_tiles", constants),
        (written.slabs * _blocks_of_slab(written), 1, 1),
        (TILE_THREADS, 1, 1),
        zeroed=(*(before,) * written.amax, ready),
    )
