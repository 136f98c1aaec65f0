"""Launches of the norm kernels that stream rows through shared memory: sm_90 and newer.

A block holds several tiles of rows in shared memory (csrc/kernels/tiles.cuh); a row too long
for one block is shared by a cluster of them. How many threads, stages and blocks is a `Staged`.
"""

import math
from dataclasses import dataclass

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.norm_problem import (
    MOST_HELD,
    NormProblem,
    constants_of,
    register_limit,
    rows_to_next_place,
)
from shardops.kernels.sizes import round_up
from shardops.kernels.target import BLOCK_RESERVE, Target

# Stages whose tiles leave from where they are: two worked on, one on its way out, and the next.
_LEAST_FOR_STORES = 4
_EXCHANGE_SLOTS = 4


@dataclass(frozen=True)
class Staged:
    """How rows stream through a block.

    Args:
      threads: of a block.
      threads_per_row: a power of two up to 32, or whole warps.
      stages: tiles in shared memory; forward, 1: a block for each tile.
      turns: rows of a tile that each group of threads takes one after another.
      cluster: blocks that share a row.
      min_blocks: blocks resident on a multiprocessor.
      store_tiles: results leave through shared memory.
      hold_gamma: forward: gamma and beta stay in registers from row to row.
      ragged: of rows that do not start on 16 bytes threads own whole words, and single elements at
        the ends; a group of threads takes rows that start at the same place of a word.
    """

    threads: int
    threads_per_row: int
    stages: int
    turns: int = 1
    cluster: int = 1
    min_blocks: int = 1
    store_tiles: bool = False
    hold_gamma: bool = True
    ragged: bool = False

    @property
    def wide(self) -> bool:
        return self.threads_per_row > 32

    @property
    def tile_rows(self) -> int:
        return self.threads // self.threads_per_row * self.turns

    def vector(self, problem: NormProblem) -> int:
        return problem.word if self.ragged else problem.vector

    def chunk(self, problem: NormProblem) -> int:
        """Columns of a row that a block owns; of a ragged one, in whole words."""
        vector = self.vector(problem)
        return -(-(problem.cols // vector) // self.cluster) * vector

    def _tile_length(self, problem: NormProblem) -> int:
        """Elements in shared memory: a ragged tile in the words that cover it."""
        spare = 2 * self.vector(problem)
        if self.ragged and self.cluster == 1:
            return self.tile_rows * problem.cols + spare
        return self.tile_rows * self.chunk(problem) + spare * self.ragged

    def per_thread(self, problem: NormProblem) -> int:
        """Elements of a row that a thread owns."""
        vector = self.vector(problem)
        return -(-(self.chunk(problem) // vector) // self.threads_per_row) * vector

    def backward_registers(self, problem: NormProblem) -> int:
        """What a thread takes: its sums and gamma, and what the passes over a row need."""
        each = self.per_thread(problem)
        needed = 80 + 16 * self.ragged + each * problem.sums
        return needed + each * TYPE_BYTES[problem.gamma] // 4

    def opens_gamma(self, problem: NormProblem) -> bool:
        """Backward: whether gamma fits in registers as float32 too, so that no row unpacks it."""
        needed = 80 + self.per_thread(problem) * (problem.sums + 1)
        return needed <= register_limit(self.threads * self.min_blocks)

    def can_hold_gamma(self, problem: NormProblem) -> bool:
        """Forward: whether gamma and beta fit in registers beside what the passes need."""
        widest = max(TYPE_BYTES[dtype] for dtype in (problem.gamma, problem.beta or problem.gamma))
        held = 96 + self.per_thread(problem) * problem.sums * widest // 4
        # Some of its rows have a word less.
        held += 8 * (self.ragged and (problem.cols + 1) % problem.word != 0)
        return held <= register_limit(self.threads * self.min_blocks)

    def shared_bytes(self, problem: NormProblem, loads: int) -> int:
        control = 16 * self.stages
        if self.wide:
            parts = self.cluster * self.threads_per_row // 32
            groups = self.threads // self.threads_per_row
            control += groups * _EXCHANGE_SLOTS * (8 + round_up(8 * parts, 16))
        tile = round_up(self._tile_length(problem) * TYPE_BYTES[problem.x], 16)
        return round_up(control, 128) + self.stages * loads * tile

    def fits(self, problem: NormProblem, target: Target, loads: int) -> bool:
        """Whether the blocks fit on a multiprocessor."""
        room = target.shared_bytes + BLOCK_RESERVE
        one = self.shared_bytes(problem, loads) + BLOCK_RESERVE
        tiles_in_bulk = self.tile_rows * self.chunk(problem) * TYPE_BYTES[problem.x] % 16 == 0
        if self.ragged:
            tiles_in_bulk = self.turns == 1 and self.threads_per_row >= 32 and not self.store_tiles
        vector = self.vector(problem)
        last = problem.cols // vector * vector - (self.cluster - 1) * self.chunk(problem)
        blocks = -(-problem.rows // self.tile_rows) * self.cluster
        return (
            one <= room
            and self.per_thread(problem) <= 2 * MOST_HELD
            and self.cluster <= target.cluster_blocks
            and (self.stages > 1 or blocks <= MAX_GRID)
            and (self.stages == 1 or not self.store_tiles or self.stages >= _LEAST_FOR_STORES)
            and one * self.min_blocks <= room
            and self.threads * self.min_blocks <= target.threads_per_sm
            and tiles_in_bulk
            and last > 0
            and (self.cluster == 1 or self.ragged or problem.vector == problem.word)
        )


def has_staged_kernels(target: Target) -> bool:
    """Whether the GPU has bulk copies, clusters and more than 200 KB of shared memory."""
    return target.data_centre and target.shared_bytes > 200 << 10


def staged_forward(problem: NormProblem, target: Target, geometry: Staged) -> Launch:
    """Plans the forward launch."""
    own = (("HOLD_GAMMA", int(geometry.hold_gamma)),)
    return _launch("norm_forward_staged", problem, target, geometry, 1 + problem.add, own)


def staged_backward(problem: NormProblem, target: Target, geometry: Staged) -> tuple[Launch, int]:
    """Plans the backward launch; and how many rows of partials it writes."""
    own = (("OPEN", int(geometry.opens_gamma(problem))),)
    launch = _launch("norm_backward_staged", problem, target, geometry, 2 + problem.add, own)
    return launch, launch.grid[0] // geometry.cluster


def _launch(
    name: str,
    problem: NormProblem,
    target: Target,
    geometry: Staged,
    loads: int,
    own: tuple[tuple[str, int], ...],
) -> Launch:
    shared = geometry.shared_bytes(problem, loads)
    tiles = -(-problem.rows // geometry.tile_rows)
    resident = tiles
    if geometry.stages > 1:
        resident = target.resident_clusters(geometry.cluster, geometry.min_blocks)
    if geometry.ragged and tiles > resident:  # each block's tiles start at one place of a word
        period = rows_to_next_place(problem)
        unit = period // math.gcd(period, geometry.tile_rows)
        resident = max(unit, resident // unit * unit)
    constants = (
        *constants_of(problem, geometry.vector(problem)),
        ("THREADS", geometry.threads),
        ("THREADS_PER_ROW", geometry.threads_per_row),
        ("TILE_ROWS", geometry.tile_rows),
        ("CLUSTER", geometry.cluster),
        ("CHUNK", geometry.chunk(problem)),
        ("STAGES", geometry.stages),
        ("MIN_BLOCKS", geometry.min_blocks),
        ("STORE_TILES", int(geometry.store_tiles)),
        ("SHARED_BYTES", shared),
        *own,
    )
    return Launch(
        Kernel(f"{name}.cuh", name, constants),
        (min(tiles, resident) * geometry.cluster, 1, 1),
        (geometry.threads, 1, 1),
        cluster=(geometry.cluster, 1, 1),
        shared_bytes=shared,
        align=16,
    )
