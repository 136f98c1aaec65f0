"""Launch plans of the quantising kernels: pure functions of shapes, types and the GPU.

Kernels are made for types and what is written, not for a shape: lengths are arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardops.kernels.element_types import TYPE_CODES
from shardops.kernels.gemm_scaled_plan import has_mxfp8
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.target import Target

TILE = 128  # rows and columns of a tile
FORMAT_CODES = {"float8_e4m3fn": 0, "float8_e5m2": 1}
SCALE_CODES = {"tensor": 0, "row128": 1, "square": 2, "row32": 3}

Scales = Literal["tensor", "row128", "square", "row32"]
Dims = tuple[int, ...]

# `Shape` of csrc/kernels/quantize_tile.cuh.
SHAPE = np.dtype(
    [
        ("rows", np.int64),
        ("cols", np.int64),
        ("groups", np.int64),
        ("tiles_down", np.uint32),
        ("tiles_across", np.uint32),
    ],
    align=True,
)
# Blocks: half of those that an H200 runs at once, the best of what was timed. For any number of
# multiprocessors, as packs are.
_AHEAD = 198
_MAGNITUDE_THREADS, _MAGNITUDE_BATCH, _MAGNITUDE_VECTOR = 256, 4, 8


@dataclass(frozen=True)
class QuantizeProblem:
    """An array [entries, groups, rows, cols] to quantise; all of it is static.

    Args:
      groups: blocks along the rows, and tiles, do not reach over one.
      x: dtype name.
      scales: what a scale covers: an entry, 1 x 128, 128 x 128 or 1 x 32 elements, the latter along
        the rows in columns.
      as_rows, as_columns: what is written.
      amax: the largest magnitude of an entry is a result.
      again: x was read before.
      blocks_first: scales of blocks lie by blocks, then by rows; of one entry alone.
    """

    entries: int
    groups: int
    rows: int
    cols: int
    x: str
    format: str
    scales: Scales
    as_rows: bool = True
    as_columns: bool = False
    amax: bool = False
    again: bool = False
    blocks_first: bool = False

    @property
    def block(self) -> int:
        """Elements along a block; 1 where there are none."""
        return {"tensor": 1, "row32": 32}.get(self.scales, 128)

    def shape(self, tile: "Tiling") -> np.void:
        """The scalar that kernels have for it."""
        tiles = -(-self.rows // tile.rows), -(-self.cols // tile.cols)
        shape = np.zeros(1, SHAPE)
        shape[0] = (self.rows, self.cols, self.groups, *tiles)
        return shape[0]

    def slabs(self, tile: "Tiling") -> int:
        """Rows of tiles."""
        return self.entries * self.groups * -(-self.rows // tile.rows)


@dataclass(frozen=True)
class Tiling:
    """A block's tile.

    Args:
      down, across: parts of 32 x 64 numbers, or of 16 x 128 where nothing is turned.
      turns: parts that each warp takes.
    """

    down: int
    across: int
    turned: bool
    turns: int = 1

    @property
    def rows(self) -> int:
        return self.down * (32 if self.turned else 16)

    @property
    def cols(self) -> int:
        return self.across * (64 if self.turned else 128)

    @property
    def warps(self) -> int:
        return self.down * self.across // self.turns

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        return (("PARTS_DOWN", self.down), ("PARTS_ACROSS", self.across), ("WARPS", self.warps))


def tiling(problem: QuantizeProblem) -> Tiling:
    """Of the quantising kernel: TILE x TILE."""
    return Tiling(4, 2, True) if problem.as_columns else Tiling(8, 1, False)


def joined(problem: QuantizeProblem, target: Target) -> QuantizeProblem:
    """The same results from fewer tiles: groups become one where blocks do not cut it otherwise.

    Where tiles are full, scales of blocks lie by blocks: those of a tile leave together then, and
    products of blocks of 128 read them so. Not where MXFP8 has products: those read rows.
    """
    p = problem
    along = p.block if p.as_columns or p.scales == "square" else 1
    if p.rows % along == 0:
        p = replace(p, groups=1, rows=p.groups * p.rows)
    apart = p.as_columns and not has_mxfp8(target.arch)
    blocks = p.scales == "row128" or (p.scales == "row32" and apart)
    return replace(p, blocks_first=blocks and p.entries == 1 and p.rows >= TILE)


def arranged(problem: QuantizeProblem, target: Target) -> QuantizeProblem:
    """`joined`; and rows alone are one stream of elements, cut into rows as short as tiles.

    Not where scales lie by blocks: rows are no stream then.
    """
    p = joined(problem, target)
    elements = p.rows * p.cols
    alone = p.groups == 1 and not p.as_columns and p.scales != "square" and not p.blocks_first
    if alone and p.cols % p.block == 0 and elements % TILE == 0:
        p = replace(p, rows=elements // TILE, cols=TILE)
    return p


def quantize_plan(problem: QuantizeProblem, target: Target) -> Launch:
    """Plans the launch for an arranged problem: a tile a block."""
    tile = tiling(problem)
    return Launch(
        Kernel(
            "quantize_tiles.cuh",
            "quantize_tiles",
            (
                ("X_TYPE", TYPE_CODES[problem.x]),
                *written_constants(problem),
                *tile.constants,
                ("LINES", _lines(problem, target)),
                ("EVEN", int(problem.cols % 8 == 0)),
                ("REVERSED", int(problem.again)),
                ("MIN_BLOCKS", _resident(problem, target)),
                ("AHEAD", _AHEAD if _is_crowded(problem, target) else 0),
            ),
        ),
        (problem.slabs(tile) * -(-problem.cols // tile.cols), 1, 1),
        (tile.threads, 1, 1),
        zeroed=(written_arrays(problem),) * problem.amax,
    )


def _lines(problem: QuantizeProblem, target: Target) -> int:
    """Whether columns leave by way of shared memory, where there are registers; 2: by halves."""
    if _is_crowded(problem, target):
        return 2
    return int(problem.as_columns and not _has_both_of_blocks(problem))


def _is_crowded(problem: QuantizeProblem, target: Target) -> bool:
    """Both layouts of blocks, where fewer registers and tiles fetched ahead were timed."""
    timed = problem.x != "float32" and target.arch == "sm_90" and not problem.again
    return timed and _has_both_of_blocks(problem)


def _has_both_of_blocks(problem: QuantizeProblem) -> bool:
    return problem.as_rows and problem.as_columns and problem.scales in ("row128", "row32")


def _resident(problem: QuantizeProblem, target: Target) -> int:
    """Blocks a multiprocessor, as far as a tile's numbers leave registers."""
    blocks = problem.scales in ("row128", "row32")
    if problem.x == "float32":
        return 2
    if target.arch not in ("sm_89", "sm_90"):  # conversions by hand, or a ptxas that takes more
        return 2 if blocks else 3
    more = problem.as_columns or (blocks and problem.as_rows)
    return 4 if problem.x == "bfloat16" and not more else 3


def written_constants(problem: QuantizeProblem) -> tuple[tuple[str, int], ...]:
    """The macros of what is written, for any kernel that writes it."""
    return (
        ("FORMAT", FORMAT_CODES[problem.format]),
        ("SCALES", SCALE_CODES[problem.scales]),
        ("ROWS", int(problem.as_rows)),
        ("COLUMNS", int(problem.as_columns)),
        ("AMAX", int(problem.amax)),
        ("BLOCKS_FIRST", int(problem.blocks_first)),
    )


def written_arrays(problem: QuantizeProblem) -> int:
    """How many results are before `amax`: data and scales, each way."""
    return (problem.as_rows + problem.as_columns) * (1 + (problem.scales != "tensor"))


def written_layouts(problem: QuantizeProblem, shapes: Sequence[Dims]) -> list[Dims | None]:
    """How the results lie, which have these shapes: dims from major to minor; None: in order."""
    layouts: list[Dims | None] = [None] * len(shapes)
    if problem.blocks_first:
        for at in range(1, written_arrays(problem), 2):
            last = len(shapes[at]) - 1
            layouts[at] = (last, *range(last))
        if problem.as_columns and problem.groups == 1:
            # [*added, cols, *rows / 128], the rows joined: cols lie innermost.
            at = written_arrays(problem) - 1
            inner = shapes[at].index(problem.cols)  # those before it are added ones, all of them 1
            layouts[at] = (*(d for d in range(len(shapes[at])) if d != inner), inner)
    return layouts


def magnitudes_plan(entries: int, count: int, x: str, target: Target) -> tuple[Launch, int]:
    """Plans the search of `entries` arrays of `count` elements; also returns the blocks of each."""
    vectors = _MAGNITUDE_THREADS * _MAGNITUDE_BATCH * _MAGNITUDE_VECTOR
    min_blocks = 2 if x == "float32" else 4
    resident = target.sm_count * min_blocks
    parts = max(1, min(-(-count // vectors), -(-2 * resident // entries)))
    constants = (
        ("X_TYPE", TYPE_CODES[x]),
        ("THREADS", _MAGNITUDE_THREADS),
        ("BATCH", _MAGNITUDE_BATCH),
        ("MIN_BLOCKS", min_blocks),
    )
    launch = Launch(
        Kernel("quantize_magnitudes.cuh", "quantize_magnitudes", constants),
        (entries * parts, 1, 1),
        (_MAGNITUDE_THREADS, 1, 1),
        zeroed=(0,),
    )
    return launch, parts
