"""Launch shapes of the norm kernels worth timing at a row length."""

import itertools
import random
from collections.abc import Iterator

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.norm_plan import Geometry
from shardops.kernels.norm_problem import (
    NormProblem,
    is_small,
    register_limit,
    rows_to_next_place,
)
from shardops.kernels.norm_ragged import Ragged
from shardops.kernels.norm_staged import Staged, has_staged_kernels
from shardops.kernels.target import Target


def norm_candidates(
    problem: NormProblem, target: Target, backward: bool, limit: int, seed: int
) -> list[Geometry | Ragged | Staged | None]:
    """None is the plan's own choice; of each kind of others at most `limit`, drawn."""
    loads = 1 + problem.add + backward
    staged = []
    if has_staged_kernels(target):
        staged = [
            g for g in _staged(problem, backward) if _worth(g, problem, target, loads, backward)
        ]
    # `norm_forward` and `norm_backward` move odd rows element by element.
    ragged = any(g.ragged for g in staged)
    in_registers: list[Geometry | Ragged] = [] if ragged else list(_in_registers(problem, backward))
    if ragged and not backward:
        in_registers = list(_ragged_in_registers(problem, target))
    elif staged and not backward:
        in_registers += [g for g in _in_clusters(problem) if g.fits(problem, target)]
    alone = [g for g in staged if g.stages == 1]
    in_turn = [g for g in staged if g.stages > 1]
    for some in (in_turn, alone, in_registers):
        random.Random(seed).shuffle(some)
    return [None, *in_turn[:limit], *alone[: limit * 2 // 3], *in_registers[: limit * 2 // 3]]


def _in_registers(problem: NormProblem, backward: bool) -> Iterator[Geometry]:
    """Rows read once into registers, by the kernels for every architecture."""
    row = problem.registers(problem.x)
    for each in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12):
        threads = -(-problem.vectors // each)
        if threads <= 32:
            threads = 1 << (threads - 1).bit_length()
        else:
            threads = -(-threads // 32) * 32
        count = -(-problem.vectors // threads)
        if threads > 1024 or count != each:
            continue
        for block, resident in itertools.product((64, 128, 256, 512), (512, 768, 1024, 1536, 2048)):
            if threads > block and threads <= 512 and block != 64:
                continue  # one row a block: once is enough
            rows = max(1, block // threads)
            if threads * rows % 32 or threads * rows > 1024:
                continue
            blocks = resident // (threads * rows)
            limit = min(255, 65536 // max(1, blocks * threads * rows))
            if blocks < 1 or blocks > 16:
                continue
            if not backward:
                if 24 + row * each * (1 + problem.add) <= limit:
                    yield Geometry(threads, rows, blocks)
                continue
            sums = each * problem.vector * problem.sums
            for prefetch, hold in ((True, True), (True, False), (False, False), (False, True)):
                held = 24 + sums + row * each * (2 + 2 * prefetch + problem.add + hold)
                if held * 0.92 <= limit:
                    yield Geometry(threads, rows, blocks, prefetch, hold)


def _in_clusters(problem: NormProblem) -> Iterator[Geometry]:
    """Long rows, of which each block of a cluster holds a part."""
    for cluster, threads, resident, hold in itertools.product(
        (2, 4, 8, 16),
        (64, 96, 128, 160, 192, 224, 256, 320, 384, 512),
        (512, 640, 768, 896, 1024, 1280, 1536),
        (False, True),
    ):
        vectors = -(-problem.vectors // cluster)
        each = -(-vectors // threads)
        blocks = resident // threads
        if each > 8 or vectors < 0.85 * each * threads or blocks * threads <= resident - 64:
            continue
        held = 26 + problem.registers(problem.x) * each * (1 + problem.add)
        held += problem.registers(problem.gamma) * each * problem.sums * hold
        if blocks and held <= register_limit(threads * blocks):
            yield Geometry(threads, 1, blocks, hold_gamma=hold, cluster=cluster)


def _ragged_in_registers(problem: NormProblem, target: Target) -> Iterator[Ragged]:
    for group, block, resident, turns in itertools.product(
        (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512),
        (64, 128, 192, 256, 512),
        (384, 512, 640, 768, 896, 1024, 1280, 1536, 2048),
        (1, 2, 3, 4, 8),
    ):
        rows = max(1, block // group)
        threads = group * rows
        each = -(-(problem.cols // problem.word) // group)
        used = problem.cols // problem.word / (each * group)
        if threads % 32 or (rows == 1 and block != 64) or each > 12 or used < 0.75:
            continue
        found = Ragged(group, rows, turns, resident // threads)
        held = 24 + 8 * (problem.kind == "layer") + (7 + 4 * problem.add) * each
        flight = 16 * each * threads * found.min_blocks  # bytes, of rows alone
        fits = found.fits(problem, target) and held <= register_limit(threads * found.min_blocks)
        if fits and flight >= 44 << 10:
            yield found


def _staged(problem: NormProblem, backward: bool) -> Iterator[Staged]:
    odd = rows_to_next_place(problem)
    if problem.vector < problem.word and problem.cols >= 128:
        yield from _ragged(backward)
        return
    for threads, group, stages, blocks, store in itertools.product(
        (64, 128, 256, 512),
        (1, 2, 4, 8, 16, 32),
        (3, 4, 5, 6, 8),
        (1, 2, 3, 4, 6, 8),
        (False, True),
    ):
        yield Staged(threads, group, stages, min_blocks=blocks, store_tiles=store)
    if not backward:
        yield from _one_tile_a_block()
    for group, groups, stages, blocks, store, cluster, hold in itertools.product(
        (64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
        (1, 2, 3, 4, 6, 8),
        (3, 4, 5, 6, 7, 8),
        (1, 2, 3, 4, 6),
        (False, True),
        (1, 2, 4, 8, 16),
        (True,) if backward else (True, False),
    ):
        if group * groups > 1024 or (cluster > 1 and groups > 1) or (backward and blocks > 3):
            continue
        turns = max(1, odd // groups) if cluster == 1 else 1
        yield Staged(groups * group, group, stages, turns, cluster, blocks, store, hold)


def _one_tile_a_block() -> Iterator[Staged]:
    for group, blocks, cluster in itertools.product(
        (64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024),
        (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
        (1, 2, 4, 8),
    ):
        if 512 <= group * blocks <= 1536:
            yield Staged(group, group, 1, 1, cluster, blocks, hold_gamma=False)


def _ragged(backward: bool) -> Iterator[Staged]:
    for group, groups, stages, blocks, cluster, hold in itertools.product(
        (32, 64, 96, 128, 160, 192, 256, 320, 384, 512),
        (1, 2, 3, 4, 6, 8),
        (3, 4, 5, 6),
        (1, 2, 3, 4),
        (1, 2, 4, 8, 16),
        (True,) if backward else (True, False),
    ):
        if group * groups <= 512 and (cluster == 1 or groups == 1):
            yield Staged(
                group * groups, group, stages, 1, cluster, blocks, hold_gamma=hold, ragged=True
            )


def _worth(g: Staged, problem: NormProblem, target: Target, loads: int, backward: bool) -> bool:
    if not g.fits(problem, target, loads) or 1 < g.stages < 3:
        return False
    each = g.per_thread(problem)
    if backward:
        registers = 40 + 16 * g.ragged + each * problem.sums + each // 2
    else:
        registers = 30 + 40 * g.ragged + each // 2 * problem.sums * g.hold_gamma
    if registers > min(255, 65536 // (g.threads * g.min_blocks)):
        return False
    small = backward and is_small(problem, target.sm_count)
    chunk = g.chunk(problem)
    vectors = chunk // g.vector(problem)
    used = vectors / (-(-vectors // g.threads_per_row) * g.threads_per_row)
    if g.wide:
        long = problem.cols * TYPE_BYTES[problem.x] >= 15 << 10
        if (
            used < (0.75 if g.ragged else 0.85)
            or (g.cluster > 1 and not long)
            or problem.cols < 256
            or each < 8
        ):
            return False
        least = 1024 if small else 2048
        if (g.cluster > 1 and chunk < least) or (chunk > 16384 and backward):
            return False
    elif used < 0.6 or each > 64:
        return False
    if small:  # few blocks, each of which writes partial sums
        return True
    # Enough bytes on their way for the memory, enough warps to work on them.
    tiles_ahead = max(1, g.stages - 1 - g.store_tiles)
    flight = g.min_blocks * tiles_ahead * loads * g.tile_rows * chunk
    warps = g.threads * g.min_blocks // 32
    return flight * TYPE_BYTES[problem.x] >= 48 << 10 and 8 <= warps <= 48
