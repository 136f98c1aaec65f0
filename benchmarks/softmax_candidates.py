"""Launch shapes of the softmax kernels that are worth timing."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from shardops.kernels.resident import Resident
from shardops.kernels.softmax_plan import chosen_backward, chosen_forward
from shardops.kernels.softmax_problem import SoftmaxProblem
from shardops.kernels.softmax_shape import Geometry, fits, has_clusters
from shardops.kernels.target import Target

_REGISTERS = 65536  # of a multiprocessor
_SHARED = 228 << 10  # bytes of a multiprocessor; 1 KiB a block is the system's


def candidates(problem: SoftmaxProblem, target: Target, operands: int) -> list[Geometry | Resident]:
    """The one that the plan chooses comes first."""
    plan = chosen_forward if operands == 1 else chosen_backward
    found: list[Geometry | Resident] = [plan(problem, target)]
    for more in (_tiles, _in_registers, _staged, _long):
        found += [g for g in more(problem, target, operands) if g not in found]
    return found


def _tiles(problem: SoftmaxProblem, target: Target, operands: int) -> Iterator[Geometry]:
    if problem.keys > 128:
        return
    size, threads = 16 // problem.vector, 256
    for group in (1, 2, 4, 8, 16, 32):
        unit = math.gcd(problem.keys, problem.vector)
        each = -(-(problem.keys // unit) // group) * unit
        if each * operands > 96 or each * group >= 2 * problem.keys + unit:
            continue
        teams = threads // group
        for bytes_wanted in (8 << 10, 16 << 10, 32 << 10):
            row = operands * problem.keys * size
            rows = teams * max(1, bytes_wanted // (teams * row))
            if operands * rows * problem.keys * size > 99 << 10:
                continue
            registers = 28 + each * operands + 8 * (problem.causal + (problem.mask > 0))
            blocks = min(8, _REGISTERS // (threads * registers), _SHARED // (rows * row + 1024))
            yield Geometry("tile", threads, rows, min_blocks=max(1, blocks), group=group)


def _in_registers(problem: SoftmaxProblem, target: Target, operands: int) -> Iterator[Geometry]:
    for parts in (1, 2, 4, 8, 16):
        if parts > 1 and problem.whole_words < 512 * parts:
            continue
        words = -(-problem.whole_words // parts)
        for each in (1, 2, 4, 8):
            if each * operands > 8 or words > 1024 * each:
                continue
            if parts == 1 and words <= 32 * each:
                least = 4 if problem.even else 2 * problem.vector
                threads = max(least, 1 << (-(-words // each) - 1).bit_length())
                if threads * each >= 2 * words:
                    continue  # a smaller `each` does as well
                shapes = [(threads, size // threads) for size in (128, 256) if size >= threads]
            else:
                threads = -(-words // (32 * each)) * 32
                shapes = [(threads, max(1, 128 // threads) if parts == 1 else 1)]
            for threads, rows in shapes:
                for hold in (True, False) if operands == 1 and each >= 4 else (True,):
                    geometry = Geometry("registers", threads, rows, parts, hold=hold)
                    yield from _resident(problem, geometry, each, operands)


def _resident(
    problem: SoftmaxProblem, geometry: Geometry, each: int, operands: int
) -> Iterator[Geometry]:
    """The two largest numbers of threads a multiprocessor whose registers should do."""
    held = each * (problem.vector if operands == 1 and geometry.hold else 4 * operands)
    needed = 22 + held + 4 * (not problem.even) + each * (problem.mask > 0)
    needed += 6 * (problem.causal + (problem.x == "float16"))
    size = geometry.threads * geometry.rows
    most = min(2048, _REGISTERS // needed) // size
    for blocks in {most, most * 3 // 4}:
        if 1 <= blocks <= 32:
            yield replace(geometry, min_blocks=blocks)


def _staged(problem: SoftmaxProblem, target: Target, operands: int) -> Iterator[Geometry]:
    if problem.words < 512 or not has_clusters(target):
        return
    for parts, blocks, threads, batch in itertools.product(
        (1, 2, 4), (1, 2, 3, 4), (192, 256, 320, 384, 512), (2, 4)
    ):
        if not 384 <= threads * blocks <= 1536 or (parts > 1 and problem.words < 1024 * parts):
            continue
        shape = Geometry("staged", threads, parts=parts, min_blocks=blocks, batch=batch)
        if fits(shape, problem, target, operands):
            yield shape


def _long(problem: SoftmaxProblem, target: Target, operands: int) -> Iterator[Geometry]:
    if problem.words < 32768:
        return
    for parts in (4, 8, 16):
        for threads, blocks in ((512, 2), (1024, 1)):
            yield Geometry("long", threads, parts=parts, min_blocks=blocks)
