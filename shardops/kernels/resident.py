"""Launches whose blocks all share each row, and read it from memory once: sm_90 and newer.

For the longest rows (csrc/kernels/resident.cuh). The blocks wait for each other, so all of them run
at the same time, one a multiprocessor.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardops.kernels.sizes import SM_COUNTS, at_most, round_up

_OTHER_WARPS = 2  # beside workers and collectors
_MOST_WORKERS = 512
_MOST_STAGES = 16
MANY_WORDS = 700  # of a row's part: more than two workers' words keep a group small


@dataclass(frozen=True)
class Resident:
    """How a block works on its part of the rows.

    Args:
      workers: threads that compute.
      groups: of them, which take rows in turn.
      stages: rows in shared memory.
      lag: rows of a group of which sums are told before the first of them is written.
      collectors: warps that bring together what blocks tell, each for another row.
    """

    workers: int
    groups: int
    stages: int
    lag: int
    collectors: int

    @property
    def threads(self) -> int:
        return self.workers + 32 * (_OTHER_WARPS + self.collectors)


@dataclass(frozen=True)
class Way:
    """How workers lie over a part of a row: each has so many of its words."""

    each: int
    groups: int = 1
    collectors: int = 2


@dataclass(frozen=True)
class Parts:
    """How rows are cut.

    Args:
      cols: of a row.
      word: elements of 16 bytes.
      even: whether all rows start on 16 bytes.
      sm_count: multiprocessors, each of which has a block at most.
    """

    cols: int
    word: int
    even: bool
    sm_count: int

    @property
    def part_cols(self) -> int:
        """Columns of a block, whole sectors of memory; some blocks have one sector less."""
        return -(-self._sectors // self.grid) * 2 * self.word

    @property
    def grid(self) -> int:
        return min(at_most(self.sm_count, SM_COUNTS), self._sectors)

    @property
    def largest(self) -> int:
        """Blocks that have no sector less."""
        return self._sectors % self.grid or self.grid

    @property
    def _sectors(self) -> int:
        return -(-self.cols // (2 * self.word))

    @property
    def words(self) -> int:
        """That a block has of a row."""
        return self.part_cols // self.word + (not self.even)

    def shared_bytes(self, geometry: Resident, operands: int) -> int:
        pairs = geometry.workers // geometry.groups // 4
        control = geometry.stages * (4 * 8 + 8 * (pairs + 2))
        return round_up(control, 128) + geometry.stages * operands * self.words * 16

    def constants(self, geometry: Resident) -> tuple[tuple[str, int], ...]:
        return (
            ("BLOCKS", self.grid),
            ("PART_COLS", self.part_cols),
            ("LARGEST", self.largest),
            ("STAGES", geometry.stages),
            ("LAG", geometry.lag),
            ("WORKERS", geometry.workers),
            ("GROUPS", geometry.groups),
            ("COLLECTORS", geometry.collectors),
        )

    def choices(self, operands: int, room: int, ways: Iterable[Way]) -> Iterator[Resident]:
        """As many rows in shared memory as `room` bytes hold: two thirds wait for their sums."""
        for way in ways:
            workers = way.groups * round_up(-(-self.words // way.each), 32)
            for stages in range(_MOST_STAGES, 2, -1):
                lag = max(1, stages * 2 // 3 // way.groups)
                found = Resident(workers, way.groups, stages, lag, way.collectors)
                fits = way.groups * lag < stages and stages % way.groups == 0
                if fits and workers <= _MOST_WORKERS and self.shared_bytes(found, operands) <= room:
                    yield found
