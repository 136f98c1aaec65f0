"""Launch plans of the norms with quantised rows: pure functions of shapes, types and the GPU.

A row is held in registers, and its blocks of scales in a warp. Columns want tiles of many rows, and
longer rows more registers than there are: those take y in float32, and then what quantises arrays.
"""

from dataclasses import dataclass

from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of
from shardops.kernels.quantize_plan import QuantizeProblem, written_constants
from shardops.kernels.sizes import round_up


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
            halved = norm.add and (norm.kind == "layer" or held > 16)
            return RowGeometry(threads, rows, max(1, resident // (1 + halved) // (threads * rows)))
    return None


def quantized_forward_plan(
    problem: QuantizedNorm, geometry: RowGeometry | None = None
) -> Launch | None:
    """Plans the launch; None where rows do not fit in registers, or more than rows is wanted.

    Args:
      geometry: overrides the one chosen, for tuning.
    """
    geometry = geometry or row_geometry(problem)
    return None if geometry is None else _rows(problem, geometry)


def _rows(problem: QuantizedNorm, geometry: RowGeometry) -> Launch:
    norm, written = problem.norm, problem.written
    own = (("FORMAT", 0), ("SCALES", 0), ("AMAX", 0))
    if written is not None:
        own = tuple(c for c in written_constants(written) if c[0] not in ("ROWS", "COLUMNS"))
    constants = (
        *constants_of(norm, norm.vector),
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
