"""Launch plans of the norms with quantised results: pure functions of shapes, types and the GPU.

Where rows alone are wanted a row is held in registers, and its blocks of scales in a warp: each
block of threads has one, or takes rows in turn (norm_quantized_rows.py). Columns want tiles of many
rows (norm_quantized_tiles.py), by which some rows are faster too. Of longer rows than registers
hold there is no plan: those take y in float32, and then what quantises arrays.
"""

from dataclasses import dataclass, replace

from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of
from shardops.kernels.norm_quantized_rows import Rows, rows_choice, rows_launch
from shardops.kernels.norm_quantized_tiles import (
    Tiles,
    tiles_after_statistics,
    tiles_in_clusters,
    tiles_launch,
)
from shardops.kernels.norm_staged import has_staged_kernels
from shardops.kernels.quantize_plan import QuantizeProblem, Tiling, joined, written_constants
from shardops.kernels.sizes import round_up
from shardops.kernels.target import Target


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


@dataclass(frozen=True)
class QuantizedPlan:
    """One launch, or two.

    Args:
      tile: of `main`; None: of rows.
      statistics: goes before it, and writes h, means and reciprocal deviations in its place.
    """

    main: Launch
    tile: Tiling | None = None
    statistics: Launch | None = None

    @property
    def launches(self) -> list[Launch]:
        return [self.main] if self.statistics is None else [self.statistics, self.main]


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
    first, last = (16, 1024, 1024), (32, 512, 512)
    if fewer:
        blocks = written is not None and written.scales == "row128"
        first = (32, 512, 768) if blocks else (24, 1024, 704)  # the others would spill
    for held, most, resident in (first, last):
        per_thread = max(1, held // each)
        if norm.vectors <= 32 * per_thread:
            threads = max(lanes, 1 << (-(-norm.vectors // per_thread) - 1).bit_length())
        else:
            threads = round_up(-(-norm.vectors // per_thread), 32)
        if threads <= most:
            rows = max(1, 128 // threads)
            while -(-norm.rows // rows) > MAX_GRID and threads * rows < 1024:
                rows *= 2
            halved = norm.add and (norm.kind == "layer" or held > 16)
            return RowGeometry(threads, rows, max(1, resident // (1 + halved) // (threads * rows)))
    return None


def quantized_forward_plan(
    problem: QuantizedNorm, target: Target, geometry: RowGeometry | Rows | Tiles | None = None
) -> QuantizedPlan | None:
    """Plans the launches; None where statistics cannot be found in registers.

    Args:
      geometry: overrides the one chosen, for tuning.
    """
    norm, written = problem.norm, problem.written
    geometry = geometry or quantized_geometry(problem, target)
    if isinstance(geometry, RowGeometry):
        return QuantizedPlan(_rows(problem, geometry, 2 if written is None else 1))
    if geometry is None or written is None:
        return None
    if isinstance(geometry, Rows):
        return QuantizedPlan(rows_launch(norm, written, target, geometry))
    written = joined(written, target)
    if geometry.cluster:
        return QuantizedPlan(tiles_launch(norm, written, geometry), geometry.tile)
    alone = QuantizedNorm(norm, None)
    rows = row_geometry(alone)
    if rows is None:
        return None
    main = tiles_launch(replace(norm, add=False), written, geometry)
    # What sets amax to zero goes between the two.
    main = replace(main, early=target.early_launches and not written.amax)
    return QuantizedPlan(main, geometry.tile, _rows(alone, rows, 0))


def quantized_geometry(problem: QuantizedNorm, target: Target) -> RowGeometry | Rows | Tiles | None:
    """Rows in turn, rows in registers, or tiles, whichever was fastest."""
    norm, written = problem.norm, problem.written
    rows = row_geometry(problem)
    if written is None:
        return rows
    in_turn = rows_choice(norm, written, target)
    if in_turn is not None:
        return in_turn
    tiles = tiles_in_clusters(norm, written, target)
    if rows is not None:
        return tiles if tiles is not None and _tiles_are_faster(norm, written, target) else rows
    return tiles or tiles_after_statistics(norm, written, target)


def _tiles_are_faster(norm: NormProblem, written: QuantizeProblem, target: Target) -> bool:
    """Of rows alone: as measured, docs/measured.md."""
    measured = norm.x != "float32" and not norm.add and 1024 <= norm.cols <= 16384
    return (
        measured
        and norm.cols % 8 == 0
        and has_staged_kernels(target)
        and written.scales != "square"
    )


def _rows(problem: QuantizedNorm, geometry: RowGeometry, writes: int) -> Launch:
    """`writes`: 0: statistics, and h; 1: what is quantised as well; 2: y in float32."""
    norm, written = problem.norm, problem.written
    own = (("FORMAT", 0), ("SCALES", 0), ("ROWS", 0), ("COLUMNS", 0), ("AMAX", 0))
    if written is not None:
        own = written_constants(written)
    constants = (
        *constants_of(norm, norm.vector),
        *own,
        ("WRITES", writes),
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
        align=16,
    )
