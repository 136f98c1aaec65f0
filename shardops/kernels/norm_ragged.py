"""Launches of the forward kernel that holds rows in registers which start anywhere in a word."""

from dataclasses import dataclass

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.norm_problem import (
    MOST_HELD,
    NormProblem,
    constants_of,
    rows_to_next_place,
)
from shardops.kernels.sizes import round_up
from shardops.kernels.target import BLOCK_RESERVE, Target


@dataclass(frozen=True)
class Ragged:
    """How a block's threads lie over rows that start at the same place of a word.

    Args:
      turns: rows that each group of threads takes one after another with the same gamma and beta
        in shared memory, where there are enough for all multiprocessors.
      min_blocks: blocks that must fit on a multiprocessor; bounds a thread's registers.
    """

    threads_per_row: int
    rows_per_block: int
    turns: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block

    def grid(self, problem: NormProblem, target: Target) -> int:
        """Blocks, in whole waves as far as rows allow, each of so many turns or a few less."""
        period = rows_to_next_place(problem)
        at_once = -(-problem.rows // (period * self.rows_per_block))  # blocks of a place, one turn
        resident = max(1, target.sm_count * self.min_blocks // period)
        waves = -(-at_once // (resident * self.turns))
        turns = -(-at_once // (resident * waves))
        return min(-(-at_once // turns), MAX_GRID // period) * period

    def fits(self, problem: NormProblem, target: Target) -> bool:
        room = target.shared_bytes + BLOCK_RESERVE
        one = shared_bytes(problem) + 1024 + BLOCK_RESERVE
        return (
            self.threads_per_row >= 2 * problem.word
            and problem.cols * TYPE_BYTES[problem.x] <= 4 * MOST_HELD * self.threads_per_row
            and self.min_blocks > 0
            and self.min_blocks * one <= room
            and self.threads * self.min_blocks <= target.threads_per_sm
        )


# Threads a multiprocessor whose registers do, by words a thread; fewer where a residual or another
# compiler's back end takes a few.
_RESIDENT = {
    "rms": (1536, 1536, 1024, 1024, 768, 768, 640, 640),
    "layer": (1024, 1024, 896, 896, 768, 640, 512, 512, 512, 512, 512, 512),
}
_SHORTEST = 256  # columns; where words of 8 bytes cut rows evenly, 448
_ALL = 1 << 20  # turns: blocks that are all resident at once share the rows


def forward_choice(problem: NormProblem, target: Target) -> Ragged | None:
    """For rows that no word of 16 bytes cuts evenly, found by benchmarks/tune.py on one H200.

    LayerNorm's long rows stream.
    """
    words = problem.cols // problem.word
    layer = problem.kind == "layer"
    shortest = 448 if 2 * problem.vector == problem.word else _SHORTEST
    if problem.vector == problem.word or problem.cols < shortest:
        return None
    if words > (1024 if layer else 3072):
        return None
    plain = not problem.add and target.arch == "sm_90"
    threads, rows, turns = _layer_shape(words, plain) if layer else _rms_shape(words)
    resident = _RESIDENT[problem.kind][-(-words // threads) - 1]
    resident -= 256 * problem.add + 128 * (target.arch != "sm_90")
    wide = TYPE_BYTES[problem.gamma] > TYPE_BYTES[problem.x] or problem.x == "float16"
    resident -= 128 * (layer and wide)
    found = Ragged(threads, rows, turns, resident // (threads * rows))
    return found if found.fits(problem, target) else None


def _layer_shape(words: int, plain: bool) -> tuple[int, int, int]:
    """Threads, rows and turns: a warp a row as long as its registers do, as warps would wait."""
    if words <= 128:
        return (16, 8, 1) if words <= 64 else (32, 4, 1)
    if words <= 256:
        return 32, 8, 2
    if words <= 384 and plain:
        return 32, 8, 1
    return (64, 2, 2) if words <= 512 else (128, 2, _ALL)


def _rms_shape(words: int) -> tuple[int, int, int]:
    """Threads, rows and turns: four words a thread; six and more of rows whose gamma takes long."""
    if words <= 1024:
        threads = 16 if words <= 64 else round_up(-(-words // 4), 32)
        return threads, max(1, -(-128 // threads)), 2 if words > 768 else 1
    return (256 if words <= 1536 else round_up(-(-words // 8), 32)), 1, 8


def shared_bytes(problem: NormProblem) -> int:
    """Of gamma and beta."""
    of_gamma = round_up(problem.cols * TYPE_BYTES[problem.gamma], 16)
    return of_gamma + (problem.cols * TYPE_BYTES[problem.beta] if problem.beta else 0)


def ragged_forward(problem: NormProblem, target: Target, geometry: Ragged) -> Launch:
    """Plans the forward launch."""
    constants = (
        *constants_of(problem, problem.word),
        ("THREADS_PER_ROW", geometry.threads_per_row),
        ("ROWS_PER_BLOCK", geometry.rows_per_block),
        ("PERIOD", rows_to_next_place(problem)),
        ("MIN_BLOCKS", geometry.min_blocks),
    )
    return Launch(
        Kernel("norm_forward_ragged.cuh", "norm_forward_ragged", constants),
        (geometry.grid(problem, target), 1, 1),
        (geometry.threads_per_row, geometry.rows_per_block, 1),
        shared_bytes=shared_bytes(problem),
        align=16,
    )
