"""How the threads of a softmax launch lie over rows: rules by row length, mask and GPU.

Short rows go through shared memory, many at once ("tile"). Rows up to what the registers of a block
or of a cluster of blocks hold are read once ("registers"), as are those that fit in the shared
memory of a block or of a cluster ("staged"); what is longer still is read twice ("long"). What is
best was found by `benchmarks/softmax_times.py --sweep` on one H200.
"""

import math

from shardops.kernels.sizes import BLOCKS_OF_A_ROW, at_most
from shardops.kernels.softmax_few import few_rows, spread
from shardops.kernels.softmax_problem import SoftmaxProblem
from shardops.kernels.softmax_shape import Geometry, clusters, fits, has_clusters
from shardops.kernels.target import Target

_TILE_THREADS = 128
_TILE_BYTES = 14 << 10


def forward_geometry(problem: SoftmaxProblem, target: Target) -> Geometry:
    """Registers where two blocks of a row fit on a multiprocessor: one loads, the other computes.

    Eight 16-byte words a thread at most, whose weights are computed twice, for want of registers.
    """
    return (
        _tile(problem, 1)
        or few_rows(problem, target)
        or _forward_registers(problem, target)
        or _many_words(problem, target)
        or _forward_cluster(problem, target)
        or _staged(problem, target)
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
    if (
        problem.causal
        and not masked
        and (problem.even or not problem.first)
        and 256 <= words <= 2048
    ):
        fewest = 1440 if target.arch == "sm_90" else 1280  # which spills on others
        resident = fewest if words <= 1024 else 1280 if words <= 1536 else 1536
        resident = 1216 if words == 256 else resident
        if not problem.even:
            resident = 1280 if words <= 1536 else 1024
        return _registers(problem, target, 4, resident, hold=False)
    resident = _resident(problem, not problem.even, _is_crowded(problem))
    if not problem.causal and not masked and not problem.even:
        resident = 1152
    return _registers(problem, target, 4, resident)


def _forward_cluster(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Weights are computed twice, for more rows at a time."""
    plain = not problem.causal and problem.mask == 0 and problem.x != "float16"
    resident = _resident(problem, not problem.even, _is_crowded(problem))
    if plain:
        resident = 1536 if target.arch == "sm_90" else 1280
    return _in_cluster(problem, target, resident, hold=False)


def backward_geometry(problem: SoftmaxProblem, target: Target) -> Geometry:
    """One word of each operand a thread up to 128, two up to 512, then four; long rows in clusters.

    Odd rows, whose edges cost each thread, and causal ones have two from the first; causal ones
    three, where that leaves fewer threads without a word, and four from 384.
    """
    words, causal = problem.whole_words, problem.causal
    odd_and_causal = not problem.even and causal
    each = 4 if words > (384 if problem.even and causal else 512) else 2
    if problem.even and not causal and words <= 128:
        each = 1
    if problem.even and causal and each == 2 and _idle(words, 3) <= _idle(words, 2):
        each = 3
    if odd_and_causal and 1024 < words <= 1536:
        each = 3  # 512 threads, of which two blocks fit; 384 of four words each would spill
    resident = _resident(problem) if each == 4 else 1152
    threads_of_long = 1024 if has_clusters(target) else _resident(problem, odd_and_causal)
    if not problem.even:
        resident = 1152 if not causal else 1344 if each == 2 else 1024 if each == 3 else 768
    return (
        _tile(problem, 2)
        or few_rows(problem, target)
        or _two_blocks(problem, target)
        or _staged_backward(problem, target)
        or _registers(problem, target, each, resident)
        or _in_cluster(problem, target, resident)
        or _registers(problem, target, each, resident, 16)
        or _long(problem, target, threads_of_long, 1)
    )


def _idle(words: int, each: int) -> int:
    """Words that a row lacks for all threads of its warps to have `each`."""
    return -(-words // (32 * each)) * 32 * each - words


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
    least_parts = spread(problem, target, 512)
    fitting = [
        n
        for n in clusters(target)
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


def _in_cluster(
    problem: SoftmaxProblem, target: Target, resident: int, *, hold: bool = True
) -> Geometry | None:
    """Four words a thread, and small blocks, several of which fit on a multiprocessor: while those
    of a row wait for each other, others work.
    """
    least_parts = spread(problem, target, 512)
    for parts in clusters(target)[1:]:
        words = -(-problem.whole_words // parts)
        if parts >= least_parts and words <= 1024:
            threads = -(-words // 128) * 32
            blocks = resident // threads
            return Geometry("registers", threads, 1, parts, blocks, hold=hold)
    return None


def _many_words(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Eight words a thread: two blocks of 512 threads leave 64 registers, which do on sm_90 alone.

    With a mask six, and their bytes, of which eight would leave no room; longer rows are staged.
    """
    masked = problem.mask == 1 and problem.even
    if masked and problem.whole_words <= 3072:
        threads = -(-problem.whole_words // 192) * 32
        return Geometry("registers", threads, min_blocks=896 // threads, hold=False)
    threads = -(-problem.whole_words // 256) * 32
    if threads > 512:
        return None
    staged = _in_shared_memory(problem, target, 1, 512, 1) if masked else None
    crowded = _is_crowded(problem) or target.arch != "sm_90"
    resident = 768 if crowded else 1024
    return staged or Geometry("registers", threads, min_blocks=resident // threads, hold=False)


def _is_crowded(problem: SoftmaxProblem) -> bool:
    """Whether what a row sees takes registers of its own."""
    return problem.causal and (problem.mask > 0 or problem.first)


def _staged(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Forward: a row of two blocks, or two clusters, fits in the memory of a multiprocessor."""
    masked = problem.mask == 1
    batch = 1 if masked else 4 if problem.even and not problem.causal else 2
    for parts in clusters(target) if has_clusters(target) else ():
        found = _in_shared_memory(problem, target, 1, 512, 2, batch=batch, parts=parts)
        if found and parts >= spread(problem, target, 1024):
            return found
    return None


def _staged_backward(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Where in registers a row would take a cluster, but two fit in shared memory. And causal rows
    of which registers would hold fewer, for as many threads do not fit.
    """
    words = problem.words
    if spread(problem, target, 512) > 1:  # few rows, each of which takes several blocks
        return None
    threads = -(-words // 256) * 32
    if problem.causal:
        in_registers = -(-words // 128) * 32
        if not 1024 < words < 2048 or 1024 // in_registers * in_registers >= 800:
            return None
        fitting = (_in_shared_memory(problem, target, 2, threads, blocks) for blocks in (4, 3, 2))
        return next((found for found in fitting if found), None)
    return _in_shared_memory(problem, target, 2, threads, 2) if 2048 < words <= 3072 else None


def _two_blocks(problem: SoftmaxProblem, target: Target) -> Geometry | None:
    """Backward, odd rows of which in shared memory words at the ends cost more than a cluster."""
    words = problem.whole_words
    parts = spread(problem, target, 512)
    if problem.even or problem.causal or not 2048 < words <= 3072:
        return None
    if parts > 2 or not has_clusters(target):
        return None
    threads = -(-words // 256) * 32
    return Geometry("registers", threads, parts=2, min_blocks=1024 // threads)


def _in_shared_memory(
    problem: SoftmaxProblem,
    target: Target,
    operands: int,
    threads: int,
    blocks: int,
    *,
    batch: int = 2,
    parts: int = 1,
) -> Geometry | None:
    """A row a block, if so many blocks fit on a multiprocessor."""
    shape = Geometry("staged", threads, parts=parts, min_blocks=blocks, batch=batch)
    return shape if has_clusters(target) and fits(shape, problem, target, operands) else None


def _resident(problem: SoftmaxProblem, *takes_registers: bool) -> int:
    """Threads a multiprocessor, by how many of these it has: odd rows, a mask or a bound.

    Fewer for float16, whose conversions take a few registers.
    """
    return (1024, 768, 640)[sum(takes_registers)] - 128 * (problem.x == "float16")


def _long(
    problem: SoftmaxProblem, target: Target, resident: int, least_blocks: int = 2
) -> Geometry:
    """A cluster a row where there are some, else enough blocks to fill the GPU."""
    parts, stages = clusters(target)[-1], 1
    if parts == 1 and problem.rows < 2 * target.sm_count:
        most = min(-(-2 * target.sm_count // problem.rows), -(-problem.words // 2048))
        parts = at_most(most, BLOCKS_OF_A_ROW)
        stages = min(2, parts)
    threads = resident // least_blocks
    return Geometry("long", threads, parts=parts, min_blocks=least_blocks, stages=stages)
