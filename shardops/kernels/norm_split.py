"""Launch plans of the norm kernels whose rows many blocks share, in two launches.

The first sums parts of rows, the second writes the results (csrc/kernels/norm_split.cuh). For rows
too long for the other kernels, and for a few long rows; on every architecture.
"""

from dataclasses import dataclass

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of, rows_to_next_place
from shardops.kernels.target import Target

_FEW_ROWS_FROM = 1 << 17  # columns


@dataclass(frozen=True)
class Split:
    """How blocks share rows.

    Args:
      threads: of a block.
      each: vectors of a row that a thread of the first launch sums.
    """

    threads: int
    each: int

    def parts(self, problem: NormProblem) -> int:
        """Blocks of the first launch that share a row."""
        return -(-problem.covered.vectors // (self.threads * self.each))

    def column_blocks(self, problem: NormProblem) -> int:
        """Blocks of the second launch that share a row."""
        return -(-problem.covered.vectors // self.threads)

    def resident(self, problem: NormProblem) -> int:
        """Blocks of the second launch on a multiprocessor, as far as registers go."""
        if problem.vector < problem.word:
            return 2 * 256 // self.threads
        return (4 if problem.sums + problem.add < 3 else 3) * 256 // self.threads

    def rows_at_once(self, problem: NormProblem, direction: str) -> int:
        """Of the second launch: as many as registers hold."""
        if direction == "forward":
            return 4 if TYPE_BYTES[problem.gamma] <= TYPE_BYTES[problem.x] else 2
        return 2 if problem.vector < problem.word or problem.sums + problem.add == 1 else 1

    def groups(self, problem: NormProblem, target: Target) -> int:
        """Blocks of the second launch that share a column; each has a row.

        As few as keep nine of ten multiprocessors busy to the end.
        """
        period = rows_to_next_place(problem)
        blocks, room = (
            self.column_blocks(problem) * period,
            target.sm_count * self.resident(problem),
        )
        busy = {n: n * blocks / (-(-n * blocks // room) * room) for n in range(1, 17)}
        enough = [n for n in busy if busy[n] >= 0.9]
        return min(
            problem.rows, period * (enough[0] if enough else max(busy, key=busy.__getitem__))
        )


@dataclass(frozen=True)
class Sums:
    """The first launch; `workspace` is the float32 array [rows, parts, values] that it writes."""

    launch: Launch
    workspace: tuple[int, int, int]


def few_rows(problem: NormProblem, target: Target) -> bool:
    """Whether clusters that take a row each would leave multiprocessors idle."""
    return problem.cols >= _FEW_ROWS_FROM and problem.rows * 16 < 4 * target.sm_count


def forward_split(problem: NormProblem) -> Split:
    return Split(256, 4 if problem.add else 8)


def backward_split(problem: NormProblem) -> Split:
    return Split(256, 2 if TYPE_BYTES[problem.gamma] > TYPE_BYTES[problem.x] else 4)


def split_sums(problem: NormProblem, geometry: Split, direction: str) -> Sums:
    """Plans the first launch."""
    name = f"norm_{direction}_sums"
    parts = geometry.parts(problem)
    grid = min(problem.rows * parts, MAX_GRID)
    launch = _launch(name, problem, geometry, grid)
    return Sums(launch, (problem.rows, parts, 3 if direction == "forward" else 2))


def split_results(
    problem: NormProblem, target: Target, geometry: Split, direction: str
) -> tuple[Launch, int]:
    """Plans the second launch; and how many groups of rows it has."""
    groups = geometry.groups(problem, target)
    blocks = geometry.column_blocks(problem) * groups
    return _launch(f"norm_{direction}_split", problem, geometry, blocks), groups


def _launch(name: str, problem: NormProblem, geometry: Split, grid: int) -> Launch:
    constants = (
        *constants_of(problem, problem.word),
        ("THREADS", geometry.threads),
        ("EACH", geometry.each),
        ("MIN_BLOCKS", geometry.resident(problem)),
        ("ROWS_AT_ONCE", geometry.rows_at_once(problem, name.split("_")[1])),
    )
    return Launch(Kernel(f"{name}.cuh", name, constants), (grid, 1, 1), (geometry.threads, 1, 1))
