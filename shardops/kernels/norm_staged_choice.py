"""Which launch shape rows that stream through shared memory take, where none was measured.

Rules by row length, found by benchmarks/tune.py on one H200.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.norm_problem import (
    NormProblem,
    is_small,
    register_limit,
    rows_to_next_place,
)
from shardops.kernels.norm_staged import Staged, has_staged_kernels
from shardops.kernels.sizes import round_up
from shardops.kernels.target import Target


def forward_choice(problem: NormProblem, target: Target) -> Staged | None:
    """For rows that registers hold badly: long ones, and those no wide word cuts."""
    loads = 1 + problem.add
    if not has_staged_kernels(target):
        return None
    if problem.vector < problem.word:
        return _ragged_or_odd(problem, target, loads, 32)
    if problem.vectors < 2048:
        return None
    alone = _a_block_a_row(problem, target, loads)
    if alone is not None:
        return alone
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


def _a_block_a_row(problem: NormProblem, target: Target, loads: int) -> Staged | None:
    """Where several blocks fit side by side: one loads its row while another writes.

    LayerNorm without a residual sums more than it moves: there rows that stream were as fast.
    """
    if problem.kind == "layer" and not problem.add:
        return None
    threads = round_up(-(-problem.cols // 64), 32)
    for blocks in (3, 2) if not problem.add else (2,):
        found = Staged(threads, threads, 1, min_blocks=blocks, hold_gamma=False)
        held = 64 + found.per_thread(problem) * TYPE_BYTES[problem.x] // 8
        if held <= register_limit(threads * blocks) and found.fits(problem, target, loads):
            return found
    return None


def few_rows_forward(problem: NormProblem, target: Target) -> Staged | None:
    """A cluster a row, where one launch takes less time than the two of norm_split.py."""
    found = Staged(512, 512, 3, cluster=8)
    simple = problem.kind == "rms" and not problem.add and problem.vector == problem.word
    fits = has_staged_kernels(target) and simple and found.can_hold_gamma(problem)
    return found if fits and found.fits(problem, target, 1) else None


def _few_rows_backward(problem: NormProblem, target: Target) -> Staged | None:
    """More blocks a row, where each would write hardly fewer partial sums than it reads rows.

    Blocks of two warps: with four, arrays that no cache held took up to a third longer.
    """
    if not 8192 < problem.cols <= 20480 or not is_small(problem, target.sm_count):
        return None
    found = Staged(64, 64, 3, cluster=8, min_blocks=2)
    fits = found.fits(problem, target, 2 + problem.add)
    return found if fits and found.backward_registers(problem) <= register_limit(128) else None


def backward_choice(problem: NormProblem, target: Target) -> Staged | None:
    """From rows on whose parameters' gradients crowd the registers of the kernels without copies.

    About 32 elements a thread: its sums are then a quarter of the registers, or half with beta.
    """
    loads = 2 + problem.add
    if not has_staged_kernels(target):
        return None
    if problem.vector < problem.word:
        return _ragged_or_odd(problem, target, loads, 32 if problem.sums == 1 else 18)
    if problem.cols < 2048:
        return None
    few = _few_rows_backward(problem, target)
    if few is not None:
        return few
    if problem.cols <= 8192:
        side_by_side = _rows_side_by_side(problem, target, loads)
        if side_by_side is not None:
            return side_by_side
        for cluster in (1, 2):
            for each in (16, 24, 32, 48) if cluster == 2 else (32, 48):
                found = _in_turn(problem, target, cluster, each, _ROOMS[2:])
                if found is not None:
                    return found
        return None
    # Chunks of 10 KB, two blocks a multiprocessor; of 16 KB, where three arrays take their room. A
    # cluster of 16 leaves a sixth of the multiprocessors idle: only where eight blocks hold no row.
    most = (16 << 10 if problem.add else 10 << 10) // TYPE_BYTES[problem.x]
    fewest = min(8, 1 << (-(-problem.cols // most) - 1).bit_length())
    for cluster, each in itertools.product((fewest, 16), (32, 24, 16, 48)):
        found = _in_turn(problem, target, cluster, each, _ROOMS, 192)
        if found is not None:
            return found
    return None


_ROOMS = ((2, 6), (2, 5), (2, 4), (1, 6), (1, 5), (1, 4), (1, 3))  # blocks, stages; best first


def _in_turn(
    problem: NormProblem,
    target: Target,
    cluster: int,
    each: int,
    rooms: Sequence[tuple[int, int]],
    least: int = 0,
) -> Staged | None:
    """A block with one row at a time, or a part of one, about `each` columns a thread.

    Args:
      least: threads on a multiprocessor.
    """
    chunk = -(-problem.vectors // cluster) * problem.vector
    threads = min(512, max(128, round_up(chunk // each, 32)))
    for blocks, stages in rooms:
        found = Staged(threads, threads, stages, 1, cluster, blocks)
        fits = found.backward_registers(problem) <= register_limit(threads * blocks)
        if fits and threads * blocks >= least and found.fits(problem, target, 2 + problem.add):
            return found
    return None


def _rows_side_by_side(problem: NormProblem, target: Target, loads: int) -> Staged | None:
    """One block a multiprocessor, so few rows of partial sums, and as many stages as there is room.

    Few elements a thread; of LayerNorm's two sums more, or threads take too long to pass them on.
    """
    least, wanted = (24, 384) if problem.sums == 2 and not problem.add else (16, 512)
    for each in (least, 32):
        group = round_up(-(-problem.cols // each), 32)
        threads = group * max(1, wanted // group)
        for stages in (6, 5, 4, 3):
            found = Staged(threads, group, stages)
            held = found.backward_registers(problem)
            if held <= register_limit(threads) and found.fits(problem, target, loads):
                return found
    return None


def _cluster_of_small_chunks(problem: NormProblem) -> int:
    """For very long rows: chunks of 4096 on 128 threads, several blocks side by side."""
    return min(16, 1 << (-(-problem.cols // 4096) - 1).bit_length())


def _ragged_or_odd(
    problem: NormProblem, target: Target, loads: int, elements: int
) -> Staged | None:
    """Long rows are ragged; where words of 8 bytes cut them evenly, from where tiles are slower."""
    backward = loads - problem.add == 2
    two_sums = backward and problem.sums == 2
    if problem.registers(problem.x) == 1:
        shortest = 256 if two_sums else 512
    else:
        shortest = 768 if two_sums else 1536
    ragged = (_ragged_backward if backward else _ragged_forward)(problem, target, loads)
    odd = _odd_rows(problem, target, loads, elements)
    return ragged or odd if problem.cols >= shortest else odd or ragged


def _ragged_forward(problem: NormProblem, target: Target, loads: int) -> Staged | None:
    """Ends of rows cost instructions, so warps must be many: 12 a multiprocessor at least."""
    for cluster in (1, 2, 4, 8, 16):
        for group in (32, 64, 96, 128, 160, 192, 256, 320, 384, 512):
            least = max(1, 128 // group)
            for groups, blocks, stages in itertools.product(
                (least, 2 * least, 3 * least, 4 * least), (4, 2, 1), (6, 5, 4, 3)
            ):
                found = Staged(groups * group, group, stages, 1, cluster, blocks, ragged=True)
                resident = found.threads * blocks
                if found.per_thread(problem) > 32 or (cluster > 1 and groups > 1):
                    continue
                if not 384 <= resident <= 640 or found.threads > 512:
                    continue
                # Parameters that are not held are read element by element.
                holds = found.can_hold_gamma(problem) and register_limit(resident) >= 96
                if holds and found.fits(problem, target, loads):
                    return found
    return None


def _ragged_backward(problem: NormProblem, target: Target, loads: int) -> Staged | None:
    """Few words a thread of short rows, and two rows a tile: of three, whose next place is eight
    tiles on, a multiple of eight blocks could run. Long rows lie in clusters.
    """
    words = problem.cols // problem.word
    if words == 0:
        return None
    for group, rows, cluster, blocks in _ragged_shapes(words, problem.sums):
        for stages in (6, 5, 4, 3):
            found = Staged(rows * group, group, stages, 1, cluster, blocks, ragged=True)
            held = found.backward_registers(problem) <= register_limit(found.threads * blocks)
            if held and found.fits(problem, target, loads):
                return found
    return None


def _ragged_shapes(words: int, sums: int) -> Iterator[tuple[int, int, int, int]]:
    """Threads a row, rows a tile, blocks a cluster and a multiprocessor; best first."""
    if words <= 64:
        yield 32, 2, 1, 4
    if words <= 128:
        yield 64, 3, 1, 2
    if words <= 512:
        group = round_up(-(-words // (2 if sums == 1 else 3)), 32)
        yield from ((group, 2, 1, 2), (group, 2, 1, 1))
    if words <= 768:
        yield 128, 2, 1, 1
    if words <= 1024:
        yield (256 if sums == 1 else 320), 1, 1, 1
    if words <= 2560:
        yield 256, 1, 2, 1
    if words <= 4096:
        yield 128, 1, 8, 2
    for cluster, each in itertools.product((1, 2, 4, 8, 16), (2, 3, 4, 5)):
        group = round_up(-(-words // (cluster * each)), 32)
        if group <= 512:
            yield group, 1, cluster, 1


def _odd_rows(problem: NormProblem, target: Target, loads: int, elements: int) -> Staged | None:
    """Rows that start off 16 bytes: tiles of several rows do not, so copies move them."""
    rows = rows_to_next_place(problem)
    for group in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512):
        if -(-problem.vectors // group) * problem.vector > elements:
            continue
        threads = round_up(max(128, group), group)
        at_once = threads // group
        turns = 1 if group <= 32 else -(-rows // at_once)
        for blocks in (6, 4, 2, 1) if problem.kind == "rms" else (4, 2, 1):
            found = Staged(threads, group, 4, turns, 1, blocks, store_tiles=True)
            found = replace(found, hold_gamma=found.can_hold_gamma(problem))
            if found.fits(problem, target, loads):
                return found
    return None
