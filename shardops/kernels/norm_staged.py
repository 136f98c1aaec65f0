"""Launches of the norm kernels that stream rows through shared memory: sm_90 and newer.

A block holds several tiles of rows in shared memory (csrc/kernels/tiles.cuh); a row too long
for one block is shared by a cluster of them. How many threads, stages and blocks is a `Staged`.
"""

import itertools
import math
from dataclasses import dataclass, replace

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import (
    NormProblem,
    constants_of,
    register_limit,
    rows_to_next_place,
)
from shardops.kernels.sizes import round_up
from shardops.kernels.target import Target

_EXCHANGE_SLOTS = 4
_RAGGED_FROM = 512  # columns
_STATIC_RESERVE = 1024  # that the system keeps of a block's shared memory


@dataclass(frozen=True)
class Staged:
    """How rows stream through a block.

    Args:
      threads: of a block.
      threads_per_row: a power of two up to 32, or whole warps.
      stages: tiles in shared memory.
      turns: rows of a tile that each group of threads takes one after another.
      cluster: blocks that share a row.
      min_blocks: blocks resident on a multiprocessor.
      store_tiles: results leave through shared memory.
      hold_gamma: forward: gamma and beta stay in registers from row to row.
      ragged: rows that do not start on 16 bytes are the words of 16 bytes that cover them; a group
        of threads takes rows that start at the same place of a word.
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
        """Columns of a row that a block owns; of a ragged one, of the words that cover it."""
        of = problem.covered if self.ragged else problem
        return -(-of.vectors // self.cluster) * of.vector

    def per_thread(self, problem: NormProblem) -> int:
        """Elements of a row that a thread owns."""
        vector = self.vector(problem)
        return -(-(self.chunk(problem) // vector) // self.threads_per_row) * vector

    def backward_registers(self, problem: NormProblem) -> int:
        """What a thread takes: its sums and gamma, and what the passes over a row need."""
        each = self.per_thread(problem)
        needed = 80 + 24 * self.ragged + each * problem.sums
        return needed + each * TYPE_BYTES[problem.gamma] // 4

    def can_hold_gamma(self, problem: NormProblem) -> bool:
        """Forward: whether gamma and beta fit in registers beside what the passes need."""
        held = 96 + self.per_thread(problem) * problem.sums * TYPE_BYTES[problem.gamma] // 4
        return held <= register_limit(self.threads * self.min_blocks)

    def shared_bytes(self, problem: NormProblem, loads: int) -> int:
        control = 16 * self.stages
        if self.wide:
            parts = self.cluster * self.threads_per_row // 32
            groups = self.threads // self.threads_per_row
            control += groups * _EXCHANGE_SLOTS * (8 + round_up(8 * parts, 16))
        tile = round_up(self.tile_rows * self.chunk(problem) * TYPE_BYTES[problem.x], 16)
        return round_up(control, 128) + self.stages * loads * tile

    def fits(self, problem: NormProblem, target: Target, loads: int) -> bool:
        """Whether the blocks fit on a multiprocessor, and a narrow block's sums in its stages."""
        room = target.shared_bytes + _STATIC_RESERVE
        one = self.shared_bytes(problem, loads) + _STATIC_RESERVE
        tiles_in_bulk = self.tile_rows * self.chunk(problem) * TYPE_BYTES[problem.x] % 16 == 0
        if self.ragged:
            tiles_in_bulk = self.turns == 1 and self.threads_per_row >= 32 and not self.store_tiles
        last = problem.cols - (self.cluster - 1) * self.chunk(problem)
        return (
            one <= room
            and one * self.min_blocks <= room
            and self.threads * self.min_blocks <= target.threads_per_sm
            and tiles_in_bulk
            and last > 0
            and (self.cluster == 1 or self.ragged or problem.vector == problem.word)
        )


def has_staged_kernels(target: Target) -> bool:
    """Whether the GPU has bulk copies, clusters of 16 and more than 200 KB of shared memory."""
    return target.cluster_blocks >= 16 and target.shared_bytes > 200 << 10


def forward_choice(problem: NormProblem, target: Target) -> Staged | None:
    """For rows that registers hold badly: long ones, and those no wide word cuts."""
    loads = 1 + problem.add
    if not has_staged_kernels(target):
        return None
    if problem.vector < problem.word:
        return _ragged_or_odd(problem, target, loads, 32)
    if problem.vectors < 2048:
        return None
    if problem.cols <= 32768:
        for cluster in (1, 2):
            chunk_vectors = -(-problem.vectors // cluster)
            threads = min(512, max(128, round_up(chunk_vectors // 5, 32)))
            for stages in (6, 5, 4):
                found = Staged(threads, threads, stages, 1, cluster)
                found = replace(found, hold_gamma=found.can_hold_gamma(problem))
                if found.fits(problem, target, loads):
                    return found
    cluster = _cluster_of_small_chunks(problem)
    threads = max(128, round_up(problem.cols // cluster // 64, 32))
    for blocks, stages in ((3, 4), (2, 4), (1, 4), (1, 3)):
        found = Staged(threads, threads, stages, 1, cluster, blocks)
        found = replace(found, hold_gamma=found.can_hold_gamma(problem))
        if found.per_thread(problem) <= 128 and found.fits(problem, target, loads):
            return found
    return None


def few_rows_forward(problem: NormProblem, target: Target) -> Staged | None:
    """A cluster a row, where one launch takes less time than the two of norm_split.py."""
    found = Staged(512, 512, 3, cluster=8)
    simple = problem.kind == "rms" and not problem.add and problem.vector == problem.word
    fits = has_staged_kernels(target) and simple and found.can_hold_gamma(problem)
    return found if fits and found.fits(problem, target, 1) else None


def few_rows_backward(problem: NormProblem, target: Target) -> Staged | None:
    """More blocks a row, where each would write hardly fewer partial sums than it reads rows."""
    few = 8192 < problem.cols <= 20480 and problem.rows <= 2 * target.sm_count
    if not few or not has_staged_kernels(target) or problem.vector < problem.word:
        return None
    found = Staged(128, 128, 3, cluster=8, min_blocks=2)
    fits = found.fits(problem, target, 2 + problem.add)
    return found if fits and found.backward_registers(problem) <= register_limit(256) else None


def backward_choice(problem: NormProblem, target: Target) -> Staged | None:
    """From rows on whose parameters' gradients crowd the registers of the kernels without copies.

    About 32 elements a thread: its sums are then a quarter of the registers, or half with beta.
    """
    loads = 2 + problem.add
    if not has_staged_kernels(target):
        return None
    if problem.vector < problem.word:
        return _ragged_or_odd(problem, target, loads, 32 // problem.sums)
    if problem.cols < 2560:
        return None
    if problem.cols <= 8192:
        clusters = (1, 2)
    elif problem.cols <= 20480:
        clusters = (2, 4)
    else:
        clusters = (_cluster_of_small_chunks(problem),)
    for cluster in clusters:
        chunk = -(-problem.vectors // cluster) * problem.vector
        for each in (16, 24, 32, 48) if cluster == 2 else (32, 48):
            threads = min(512, max(128, round_up(chunk // each, 32)))
            for blocks, stages in ((2, 4), (1, 6), (1, 5), (1, 4), (1, 3)):
                found = Staged(threads, threads, stages, 1, cluster, blocks)
                held = found.backward_registers(problem)
                if held <= register_limit(threads * blocks) and found.fits(problem, target, loads):
                    return found
    return None


def _cluster_of_small_chunks(problem: NormProblem) -> int:
    """For very long rows: chunks of 4096 on 128 threads, several blocks side by side."""
    return min(16, 1 << (-(-problem.cols // 4096) - 1).bit_length())


def _ragged_or_odd(
    problem: NormProblem, target: Target, loads: int, elements: int
) -> Staged | None:
    """Long rows of which words of 4 bytes at most are cut evenly are ragged."""
    ragged = _ragged_rows(problem, target, loads)
    if problem.cols >= _RAGGED_FROM and problem.registers(problem.x) == 1:
        return ragged or _odd_rows(problem, target, loads, elements)
    return _odd_rows(problem, target, loads, elements) or ragged


def _ragged_rows(problem: NormProblem, target: Target, loads: int) -> Staged | None:
    """Ends of rows cost instructions, so warps must be many: 12 a multiprocessor at least."""
    backward = loads - problem.add == 2
    elements = 32 if not backward else 24 if problem.cols < 16384 else 32 // problem.sums
    for cluster in (1, 2, 4, 8, 16):
        for group in (32, 64, 96, 128, 160, 192, 256, 320, 384, 512):
            least = max(1, 128 // group)
            for groups, blocks, stages in itertools.product(
                (least, 2 * least, 3 * least, 4 * least), (4, 2, 1), (6, 5, 4, 3)
            ):
                found = Staged(groups * group, group, stages, 1, cluster, blocks, ragged=True)
                resident = found.threads * blocks
                if found.per_thread(problem) > elements or (cluster > 1 and groups > 1):
                    continue
                if not 384 <= resident <= 640 or found.threads > 512:
                    continue
                # Parameters that are not held are read element by element.
                holds = backward or found.can_hold_gamma(problem)
                held = found.backward_registers(problem) if backward else 96
                limit = register_limit(resident)
                if holds and held <= limit and found.fits(problem, target, loads):
                    return found
    return None


def _odd_rows(problem: NormProblem, target: Target, loads: int, elements: int) -> Staged | None:
    """Rows that start off 16 bytes: tiles of several rows do not, so copies move them."""
    rows = rows_to_next_place(problem)
    for group in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512):
        if -(-problem.vectors // group) * problem.vector > elements:
            continue
        threads = round_up(max(128, group), group)
        at_once = threads // group
        turns = 1 if group <= 32 else -(-rows // at_once)
        for blocks, stages in ((4, 4), (2, 4), (1, 4)):
            found = Staged(threads, group, stages, turns, 1, blocks, store_tiles=True)
            found = replace(found, hold_gamma=found.can_hold_gamma(problem))
            if found.fits(problem, target, loads):
                return found
    return None


def staged_forward(problem: NormProblem, target: Target, geometry: Staged) -> Launch:
    """Plans the forward launch."""
    own = (("HOLD_GAMMA", int(geometry.hold_gamma)),)
    return _launch("norm_forward_staged", problem, target, geometry, 1 + problem.add, own)


def staged_backward(problem: NormProblem, target: Target, geometry: Staged) -> tuple[Launch, int]:
    """Plans the backward launch; and how many rows of partials it writes."""
    launch = _launch("norm_backward_staged", problem, target, geometry, 2 + problem.add, ())
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
    resident = max(1, target.sm_count * geometry.min_blocks // geometry.cluster)
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
    )
