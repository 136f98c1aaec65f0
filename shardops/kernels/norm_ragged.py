"""Launches of the forward kernel that holds rows in registers which start anywhere in a word."""

from dataclasses import dataclass

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of, rows_to_next_place
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
        period = rows_to_next_place(problem)
        at_once = -(-problem.rows // (period * self.rows_per_block))  # blocks of a place, one turn
        resident = target.sm_count * self.min_blocks
        turns = min(self.turns, -(-at_once * period // resident))
        return min(-(-at_once // turns), MAX_GRID // period) * period

    def fits(self, problem: NormProblem, target: Target) -> bool:
        room = target.shared_bytes + BLOCK_RESERVE
        one = shared_bytes(problem) + 1024 + BLOCK_RESERVE
        return (
            self.threads_per_row >= 2 * problem.word
            and self.min_blocks > 0
            and self.min_blocks * one <= room
            and self.threads * self.min_blocks <= target.threads_per_sm
        )


# Threads a multiprocessor whose registers do, by words a thread; fewer where a residual or another
# compiler's back end takes a few.
_RESIDENT = {
    "rms": (1536, 1536, 1024, 1024, 768, 768, 640, 512),
    "layer": (1024, 1024, 896, 896, 640, 640, 512, 512),
}
_SHORTEST = 256  # columns


def forward_choice(problem: NormProblem, target: Target) -> Ragged | None:
    """For rows that no word of 16 bytes cuts evenly, found by benchmarks/tune.py on one H200.

    Four words a thread, or six and more of rows whose gamma takes long to bring; LayerNorm, whose
    warps would wait for each other, eight. Its long rows stream.
    """
    words = problem.cols // problem.word
    layer = problem.kind == "layer"
    if problem.vector == problem.word or problem.cols < _SHORTEST:
        return None
    if words > (1024 if layer else 3072):
        return None
    threads, turns = _threads(words, layer), 1
    if layer and words > 128:
        turns = 2 if words <= 512 else 8
    elif words > 1024:
        turns = 4
    resident = _RESIDENT[problem.kind][-(-words // threads) - 1]
    resident -= 256 * problem.add + 128 * (target.arch != "sm_90")
    rows = max(1, -(-128 // threads))
    found = Ragged(threads, rows, turns, resident // (threads * rows))
    return found if found.fits(problem, target) else None


def _threads(words: int, layer: bool) -> int:
    """A power of two for LayerNorm; else whole warps, or a half of one."""
    if words <= 64:
        return 16
    each = 8 if layer or words > 1024 else 4
    if layer:
        return max(32, 1 << (-(-words // each) - 1).bit_length())
    return round_up(-(-words // each), 32)


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
