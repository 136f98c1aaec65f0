"""Launch plans of the norms with quantised results: pure functions of shapes, types and the GPU.

Rows alone come from the registers that hold a row: one launch. Columns need tiles of many rows,
whose statistics another launch finds before. So do rows that are too long for registers, or whose
blocks of scales do not lie in a warp.
"""

from dataclasses import dataclass

from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of, round_up
from shardops.kernels.quantize_plan import (
    TILE,
    TILE_THREADS,
    QuantizeProblem,
    converts,
    written_arrays,
    written_constants,
)
from shardops.kernels.target import Target

_STATISTICS_THREADS = 256
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
    # Registers of a row that a thread holds, the most threads, and how many a multiprocessor has.
    # Of long rows fewer threads, with more each, wait for each other.
    fewer = norm.kind == "rms" and not norm.add and norm.vectors > 1024
    for held, most, resident in ((24, 1024, 704) if fewer else (16, 1024, 1024), (32, 512, 512)):
        per_thread = max(1, held // each)
        if norm.vectors <= 32 * per_thread:
            threads = max(lanes, 1 << (-(-norm.vectors // per_thread) - 1).bit_length())
        else:
            threads = round_up(-(-norm.vectors // per_thread), 32)
        if threads <= most:
            rows = max(1, 128 // threads)
            halved = norm.add and (norm.kind == "layer" or held > 16)
            return RowGeometry(threads, rows, max(1, resident // (1 + halved) // (threads * rows)))
    return None


def quantized_forward_plan(
    problem: QuantizedNorm, target: Target, geometry: RowGeometry | None = None
) -> tuple[Launch, ...]:
    """Plans the launches: of rows in registers; or of statistics, then of tiles.

    No launch for y in float32 of rows too long for registers.

    Args:
      problem: what is written is arranged by `joined`.
      geometry: overrides the one chosen for rows in registers, for tuning.
    """
    geometry = geometry or row_geometry(problem)
    if geometry is not None:
        return (_rows(problem, geometry),)
    if problem.written is None:
        return ()
    return _statistics(problem.norm, target), _tiles(problem.norm, problem.written, target)


def statistics_rows(cols: int) -> int:
    """Rows whose statistics a block finds: it reads as much as one that quantises a tile."""
    rows = 1
    while rows < _MOST_ROWS and 2 * rows * cols <= TILE * TILE:
        rows *= 2
    return rows


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


def _statistics(norm: NormProblem, target: Target) -> Launch:
    rows = statistics_rows(norm.cols)
    constants = (
        *_of_any_length(norm),
        ("STAT_ROWS", rows),
        ("MIN_BLOCKS", 3 if norm.kind == "rms" and converts(target) else 2),
    )
    return Launch(
        Kernel("norm_statistics.cuh", "norm_statistics", constants),
        (-(-norm.rows // rows), 1, 1),
        (_STATISTICS_THREADS, 1, 1),
    )


def _tiles(norm: NormProblem, written: QuantizeProblem, target: Target) -> Launch:
    constants = (
        *(c for c in _of_any_length(norm) if c[0] != "HAS_ADD"),
        *written_constants(written),
        ("MIN_BLOCKS", _resident(norm, written, target)),
    )
    return Launch(
        Kernel("norm_quantized_tiles.cuh", "norm_quantized_tiles", constants),
        (written.slabs * -(-written.cols // TILE), 1, 1),
        (TILE_THREADS, 1, 1),
        zeroed=(written_arrays(written),) * written.amax,
    )


def _of_any_length(norm: NormProblem) -> tuple[tuple[str, int], ...]:
    of_length = ("COLS", "VECTOR")
    constants = tuple(c for c in constants_of(norm) if c[0] not in of_length)
    return (*constants, ("EVEN", int(norm.cols % 8 == 0)))


def _resident(norm: NormProblem, written: QuantizeProblem, target: Target) -> int:
    """Blocks a multiprocessor, as far as a tile's numbers and parameters leave registers."""
    if norm.x == "float32":
        return 2 if converts(target) else 1
    return 2
