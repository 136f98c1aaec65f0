"""How the threads of a softmax launch lie over rows: rules by row length, mask and GPU.

Short rows go through shared memory, many at once ("tile"). Rows up to what the registers of a block
or of a cluster of blocks hold are read once ("registers"), as are those that fit in the shared
memory of a block or of a cluster ("staged"); what is longer still is read twice ("long"). What is
best was found by `benchmarks/softmax_times.py --sweep` on one H200.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardops.kernels.softmax_problem import SoftmaxProblem
from shardops.kernels.target import Target

_TILE_THREADS = 128
_TILE_BYTES = 14 << 10


@dataclass(frozen=True)
class Geometry:
    """How a launch's threads lie over rows.

    Args:
      kind: which of the kernels.
      threads: a row; of a tile, a block.
      rows: a block, or a tile.
      parts: blocks a row. They are a cluster, unless there are two stages.
      min_blocks: blocks that must fit on a multiprocessor; bounds a thread's registers.
      hold: "registers", forward: weights are held from the sum to the result, not computed twice.
      group: "tile": threads a row.
      stages: "long": 2 where parts are merged by a second launch.
      batch, depth: "staged": words of a chunk that a thread has, and places for chunks.
    """

    kind: Literal["registers", "tile", "staged", "long"]
    threads: int
    rows: int = 1
    parts: int = 1
    min_blocks: int = 1
    hold: bool = True
    group: int = 1
    stages: int = 1
    batch: int = 1
    depth: int = 0

    def chunks(self, problem: SoftmaxProblem) -> int:
        """Of a row's part, in a "staged" block."""
        words = -(-problem.words // self.parts)
        return -(-words // (self.threads * self.batch))


def forward_geometry(problem: SoftmaxProblem, target: Target) -> Geometry:
    """Registers where two blocks of a row fit on a multiprocessor: one loads, the other computes.

    Eight 16-byte words a thread at most, whose weights are computed twice, for want of registers.
    """
    return (
        _tile(problem, 1)
        or _forward_registers(problem, target)
        or _eight_words(problem, target)
        or _staged(problem, target, 1)
        or _long(problem, target, _resident(problem, not problem.even or problem.mask > 0))
    )


def _forward_registers(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Two or three words a thread up to 512, then four.

    Four too for causal rows, of which threads may see nothing; long ones computed twice, so that
    more of them fit. And for odd rows with a mask, whose bytes are in no place to load words of.
    """
    words, masked = problem.whole_words, problem.mask > 0
    if words <= 512 and not problem.causal and (problem.even or not masked):
        return _registers(problem, target, 3, 1152 if problem.even else 1024)
    if problem.causal and problem.even and not masked and 256 < words <= 2048:
        fewest = 1440 if target.arch == "sm_90" else 1280  # which spills on others
        resident = fewest if words <= 1024 else 1280 if words <= 1536 else 1536
        return _registers(problem, target, 4, resident, hold=False)
    resident = _resident(problem, not problem.even, _is_crowded(problem))
    return _registers(problem, target, 4, resident)


def backward_geometry(problem: SoftmaxProblem, target: Target) -> Geometry:
    """One word of each operand a thread up to 128, two up to 512, then four; long rows in clusters.

    Odd rows, whose edges cost each thread, and causal ones have two from the first.
    """
    each = 4 if problem.whole_words > 512 else 2
    if problem.even and not problem.causal and problem.whole_words <= 128:
        each = 1
    resident = _resident(problem, not problem.even and problem.causal) if each == 4 else 1152
    return (
        _tile(problem, 2)
        or _staged_causal(problem, target)
        or _registers(problem, target, each, resident, 2)
        or (None if problem.causal else _staged(problem, target, 2))
        or _registers(problem, target, each, resident, 16)
        or _long(problem, target, 1024 if has_clusters(target) else resident, 1)
    )


def _tile(problem: SoftmaxProblem, operands: int) -> Geometry | None:
    """Where a row is too few words, or such a number of them, that threads would be idle."""
    if problem.whole_words >= (4 if problem.even else 14):
        return None
    unit, size = math.gcd(problem.keys, problem.vector), 16 // problem.vector
    group = 1
    while -(-problem.keys // (unit * group)) * unit > 28:
        group *= 2
    if operands == 2 and unit * size == 8 and problem.keys >= 16 * unit:
        group = 16  # half a warp, which reads 8 bytes a lane without bank conflicts
    teams = _TILE_THREADS // group
    turns = max(1, _TILE_BYTES // (teams * problem.keys * size))
    filled = [_filled(n * teams * problem.keys * size) for n in range(1, turns + 1)]
    rows = teams * next(n for n, part in enumerate(filled, 1) if part >= 0.97 * max(filled))
    shared = operands * rows * problem.keys * size
    copied = 4 * -(-shared // (16 * _TILE_THREADS))
    held = -(-problem.keys // (unit * group)) * unit * operands
    registers = max(32 + held, 24 + copied) + 16 * (problem.causal + (problem.mask > 0))
    min_blocks = min(8, 65536 // (_TILE_THREADS * registers), (200 << 10) // shared)
    return Geometry("tile", _TILE_THREADS, rows=rows, min_blocks=min_blocks, group=group)


def _filled(tile_bytes: int) -> float:
    """How full a tile keeps its threads: with three words each at least, all of them to the end."""
    words = tile_bytes / 16 / _TILE_THREADS
    return words / max(3, math.ceil(words))


def _registers(
    problem: SoftmaxProblem,
    target: Target,
    each: int,
    resident: int,
    most_parts: int = 1,
    *,
    hold: bool = True,
) -> Geometry | None:
    """A block a row, or several rows a block; a cluster where rows leave multiprocessors idle.

    Args:
      each: words a thread, at most.
      resident: threads a multiprocessor, whose registers they share, of two blocks at least.
      most_parts: blocks a row, where it is not to leave multiprocessors idle.
    """
    least_parts = _spread(problem, target, 512)
    fitting = [
        n
        for n in _clusters(target)
        if least_parts <= n <= max(least_parts, most_parts)
        and problem.whole_words <= n * each * min(1024, resident // 2)
    ]
    if not fitting:
        return None
    parts = fitting[0]
    words = -(-problem.whole_words // parts)
    needed = -(-words // each)
    threads = -(-needed // 32) * 32
    if needed <= 32 or (each == 3 and parts == 1):
        threads = 1 << (needed - 1).bit_length()
        if threads == 256 and words < 480:  # few of 256 would have a second; of 128 most have four
            threads = -(-words // 64) * 32 if problem.mask else 128
    elif 64 < threads < 128:
        threads = 128
    rows = 1
    if parts == 1 and (threads < 64 or not problem.causal):
        threads = max(4 if problem.even else 2 * problem.vector, threads)
        rows = max(1, 128 // threads)
    blocks = min(32, resident // (threads * rows))
    return Geometry("registers", threads, rows, parts, blocks, hold=hold)


def _eight_words(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Two blocks of 512 threads leave 64 registers, which do on sm_90 alone."""
    threads = -(-problem.whole_words // 256) * 32
    if threads > 512:
        return None
    masked_odd = problem.mask > 0 and not problem.even
    crowded = masked_odd or _is_crowded(problem) or target.arch != "sm_90"
    resident = 768 if crowded else 1024
    return Geometry("registers", threads, min_blocks=resident // threads, hold=False)


def _is_crowded(problem: SoftmaxProblem) -> bool:
    """Whether what a row sees takes registers of its own."""
    return problem.causal and (problem.mask > 0 or problem.first)


def _staged(problem: SoftmaxProblem, target: Target, operands: int) -> Geometry | None:
    """One block a row, of half a multiprocessor's memory, so that one computes while another loads;
    or of all of it, so that there is room for some of the next row. Else more blocks, of half.
    """
    threads, batch = 512, 4
    chunk = 16 * threads * batch * operands
    depth = (target.shared_bytes - (1 << 10)) // chunk
    for parts in _clusters(target) if has_clusters(target) else ():
        words = -(-problem.words // parts)
        chunks = -(-words // (threads * batch))
        if parts < _spread(problem, target, 1024):
            continue
        if operands == 1 and 2 * chunks <= depth:  # there are half the registers
            odd, masked = not problem.even, problem.mask > 0
            batch = 4 >> (odd or masked or problem.causal) + (odd and masked)
            chunks = -(-words // (threads * batch))
            return Geometry("staged", threads, 1, parts, 2, batch=batch, depth=chunks)
        if parts <= operands and chunks <= depth:
            plain = operands == 1 and problem.even and not problem.causal and problem.mask == 0
            if plain and -(-words // (2 * threads * batch)) <= depth // 2:
                threads, depth = 2 * threads, depth // 2
            return Geometry("staged", threads, parts=parts, batch=batch, depth=depth)
    return None


def _staged_causal(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Backward, causal: where registers would take a cluster, of whose blocks the last have nothing
    to do in most rows, but two blocks of a row each fit on a multiprocessor.
    """
    threads, batch = 256, 2
    chunks = -(-problem.words // (threads * batch))
    room = (target.shared_bytes + (1 << 10)) // 2 - (3 << 9)  # less the system's and the barriers
    depth = room // (32 * threads * batch)
    if not problem.causal or problem.words <= 2048 or not has_clusters(target) or chunks >= depth:
        return None
    return Geometry("staged", threads, min_blocks=2, batch=batch, depth=depth)


def _spread(problem: SoftmaxProblem, target: Target, least: int) -> int:
    """The most blocks a row that few rows can have, of so many words each at least."""
    parts = 1
    for more in _clusters(target)[1:]:
        if more * problem.rows <= target.sm_count and problem.words >= more * least:
            parts = more
    return parts


def has_clusters(target: Target) -> bool:
    """Whether blocks can share a row, and copies run beside threads."""
    return target.cluster_blocks > 1


def _clusters(target: Target) -> tuple[int, ...]:
    """Sizes of clusters that the GPU launches, from 1 on."""
    return tuple(1 << i for i in range(target.cluster_blocks.bit_length()))


def _resident(problem: SoftmaxProblem, *takes_registers: bool) -> int:
    """Threads a multiprocessor, by how many of these it has: odd rows, a mask or a bound.

    Fewer for float16, whose conversions take a few registers.
    """
    return (1024, 768, 640)[sum(takes_registers)] - 128 * (problem.x == "float16")


def _long(
    problem: SoftmaxProblem, target: Target, resident: int, least_blocks: int = 2
) -> Geometry:
    """A cluster a row where there are some, else enough blocks to fill the GPU."""
    parts, stages = _clusters(target)[-1], 1
    if parts == 1 and problem.rows < 2 * target.sm_count:
        parts = min(64, -(-2 * target.sm_count // problem.rows), -(-problem.words // 2048))
        stages = min(2, parts)
    threads = resident // least_blocks
    return Geometry("long", threads, parts=parts, min_blocks=least_blocks, stages=stages)
