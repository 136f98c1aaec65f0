"""Launches of the norm kernels whose rows all blocks of a launch share (resident.py)."""

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import (
    NormProblem,
    constants_of,
    register_limit,
    rows_to_next_place,
)
from shardops.kernels.norm_staged import has_staged_kernels
from shardops.kernels.norm_staged_choice import few_rows_forward
from shardops.kernels.resident import MANY_WORDS, Parts, Resident, Way
from shardops.kernels.sizes import round_up
from shardops.kernels.target import Target

_LONG = 1 << 18  # columns
_LONG_OF_FEW = 1 << 17
_EDGE_BYTES = 4 << 10  # at most, of what the backward's warps hand over


def parts_of(problem: NormProblem, target: Target) -> Parts:
    even = rows_to_next_place(problem) == 1
    return Parts(problem.cols, problem.word, even, target.sm_count)


def resident_choice(problem: NormProblem, target: Target, direction: str) -> Resident | None:
    """The shape of a launch for very long rows; None where others are faster, or there is no room.

    Not for a few rows whose squares are all that has to be known: clusters take one launch as well,
    and nothing to be set to zero before it.
    """
    few = problem.rows * 16 < 4 * target.sm_count
    if problem.cols < (_LONG_OF_FEW if few else _LONG) or not has_staged_kernels(target):
        return None
    if few and direction == "forward" and few_rows_forward(problem, target) is not None:
        return None
    parts = parts_of(problem, target)
    room = target.shared_bytes - _own_bytes(problem, parts, direction)
    ways = _ways_of_few(parts, direction) if few else _ways(parts, direction)
    for found in parts.choices(_operands(problem, direction), room, ways):
        needed = _registers(problem, parts, found, direction, target.arch)
        if needed <= register_limit(found.threads):
            return found
    return None


def _ways(parts: Parts, direction: str) -> tuple[Way, ...]:
    """Backward the sums of columns stay with a worker, so it has few; all workers move them on."""
    many = parts.words > MANY_WORDS
    if direction == "backward" and (many or not parts.even):
        # Of the longest rows shared memory has a few: one warp that collects was faster than two.
        collectors = 1 if many else 2
        words = (2, 3, 4) if parts.even else (2, 3)
        return tuple(Way(each, collectors=collectors) for each in words)
    if not many:
        return (Way(2, 4), Way(2, 2), Way(2))
    return (Way(4, 2), Way(2), Way(4))


def _ways_of_few(parts: Parts, direction: str) -> tuple[Way, ...]:
    """What counts is how soon the last row is done."""
    if parts.words > MANY_WORDS or not parts.even:
        return _ways(parts, direction)
    if direction == "backward":
        return (Way(1), *_ways(parts, direction))
    return (Way(2, 4, 4), *_ways(parts, direction))


def resident_launch(
    problem: NormProblem, target: Target, geometry: Resident, direction: str
) -> tuple[Launch, tuple[int, int, int]]:
    """The launch; and its last result, which it has to find zero: uint32 [rows, blocks, 2]."""
    parts = parts_of(problem, target)
    shared = parts.shared_bytes(geometry, _operands(problem, direction))
    shared += _own_bytes(problem, parts, direction)
    constants = (
        *constants_of(problem, problem.word),
        *parts.constants(geometry),
        ("PERIOD", rows_to_next_place(problem)),
        ("SHARED_BYTES", shared),
    )
    name = f"norm_{direction}_resident"
    others = 1 + problem.sums
    if direction == "forward":
        others = 2 + problem.add + (problem.kind == "layer")
    launch = Launch(
        Kernel(f"{name}.cuh", name, constants),
        (parts.grid, 1, 1),
        (geometry.threads, 1, 1),
        shared_bytes=shared,
        zeroed=(others,),
        align=16,
        resident=True,
    )
    return launch, (problem.rows, parts.grid, 2)


def _operands(problem: NormProblem, direction: str) -> int:
    return 1 + problem.add + (direction == "backward")


def _own_bytes(problem: NormProblem, parts: Parts, direction: str) -> int:
    """Beside the rows: gamma and beta where workers' columns move on, and what moves with them."""
    held = [problem.gamma]
    if direction == "forward" and problem.beta is not None:
        held.append(problem.beta)
    bytes_of = [round_up((parts.part_cols + parts.word) * TYPE_BYTES[dtype], 16) for dtype in held]
    barrier = 16 * (direction == "backward")
    return barrier if parts.even else barrier + sum(bytes_of) + _EDGE_BYTES * (barrier > 0)


def _registers(
    problem: NormProblem, parts: Parts, geometry: Resident, direction: str, arch: str
) -> int:
    """The registers that a worker's variables take; float16 off words wants a few more."""
    group = geometry.workers // geometry.groups
    each = -(-parts.words // group) * problem.word
    held = [problem.x, problem.gamma, *([problem.beta] if problem.beta else [])]
    others = 48 + 8 * (arch != "sm_90") + 8 * (not parts.even and "float16" in held)
    if direction == "forward":
        return others + sum(each * TYPE_BYTES[dtype] // 4 for dtype in held)
    return others + each * problem.sums + each * TYPE_BYTES[problem.gamma] // 4
