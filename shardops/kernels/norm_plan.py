"""Launch plans of the norm kernels: pure functions of shapes, types and the GPU.

A row is cut into vectors of up to 16 bytes. Rows whose vectors fit in the registers of one block
take the kernels that read them once. On sm_90 and newer, rows stream through shared memory
(norm_staged.py) where that is faster; the longest are shared by all blocks (norm_resident.py), or
take two launches (norm_split.py).
"""

import math
from dataclasses import dataclass

from shardops.kernels import (
    norm_ragged,
    norm_registers,
    norm_resident,
    norm_split,
    norm_staged_choice,
    tuned,
)
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of
from shardops.kernels.norm_ragged import Ragged
from shardops.kernels.norm_registers import Geometry
from shardops.kernels.norm_split import Split, Sums
from shardops.kernels.norm_staged import Staged, staged_backward, staged_forward
from shardops.kernels.resident import Resident
from shardops.kernels.target import Target

Shape = Geometry | Staged | Split | Resident
ForwardShape = Shape | Ragged

_PARTIALS_AT_ONCE = 136


@dataclass(frozen=True)
class ForwardPlan:
    """One launch, and what goes before it, if anything.

    Args:
      pairs: a uint32 array that is its last result, where it needs one.
    """

    main: Launch
    sums: Sums | None = None
    pairs: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class BackwardPlan:
    """One launch or two; `workspace` is an array that is the last result of the first.

    Args:
      finish: sums up the workspace, float32 [sums, blocks, cols]; None where `main` has summed up,
        and the workspace is uint32 and of no use any more.
      sums: what goes before them, if anything.
    """

    main: Launch
    finish: Launch | None
    workspace: tuple[int, int, int]
    sums: Sums | None = None


def forward_plan(
    problem: NormProblem, target: Target, geometry: ForwardShape | None = None
) -> ForwardPlan:
    """Plans the forward launches; `geometry` overrides the one chosen, for tuning."""
    geometry = geometry or forward_geometry(problem, target)
    if isinstance(geometry, Resident):
        main, pairs = norm_resident.resident_launch(problem, target, geometry, "forward")
        return ForwardPlan(main, pairs=pairs)
    if isinstance(geometry, Split):
        main, _ = norm_split.split_results(problem, target, geometry, "forward")
        return ForwardPlan(main, norm_split.split_sums(problem, geometry, "forward"))
    if isinstance(geometry, Staged):
        return ForwardPlan(staged_forward(problem, target, geometry))
    if isinstance(geometry, Ragged):
        return ForwardPlan(norm_ragged.ragged_forward(problem, target, geometry))
    if geometry.cluster > 1:
        return ForwardPlan(_in_clusters(problem, geometry))
    constants = (*_constants(problem, geometry), ("STREAM", 1))
    main = Launch(
        Kernel("norm_forward.cuh", "norm_forward", constants),
        (_blocks(problem, geometry), 1, 1),
        (geometry.threads_per_row, geometry.rows_per_block, 1),
        align=16,
    )
    return ForwardPlan(main)


def _in_clusters(problem: NormProblem, geometry: Geometry) -> Launch:
    parts = geometry.cluster * geometry.threads_per_row // 32
    shared_bytes = 2 * (8 * parts + 8)  # two slots: sums of each warp, a barrier
    own = (
        ("CLUSTER", geometry.cluster),
        ("CHUNK", geometry.chunk(problem)),
        ("HOLD_GAMMA", int(geometry.hold_gamma)),
        ("SHARED_BYTES", shared_bytes),
    )
    return Launch(
        Kernel(
            "norm_forward_cluster.cuh", "norm_forward_cluster", _constants(problem, geometry) + own
        ),
        (problem.rows * geometry.cluster, 1, 1),
        (geometry.threads_per_row, 1, 1),
        cluster=(geometry.cluster, 1, 1),
        shared_bytes=shared_bytes,
        align=16,
    )


def backward_plan(
    problem: NormProblem, target: Target, geometry: Shape | None = None
) -> BackwardPlan:
    """Plans the backward launch and the sum of its partials."""
    geometry = geometry or backward_geometry(problem, target)
    if isinstance(geometry, Resident):
        main, pairs = norm_resident.resident_launch(problem, target, geometry, "backward")
        return BackwardPlan(main, None, pairs)
    if isinstance(geometry, Split):
        main, groups = norm_split.split_results(problem, target, geometry, "backward")
        workspace = (problem.sums, groups, problem.cols)
        sums = norm_split.split_sums(problem, geometry, "backward")
        return BackwardPlan(main, _finish_few(problem, target), workspace, sums)
    if isinstance(geometry, Staged):
        main, partials = staged_backward(problem, target, geometry)
        finish = _finish(problem, target, geometry.min_blocks / geometry.cluster)
        return BackwardPlan(main, finish, (problem.sums, partials, problem.cols))
    grid = min(_blocks(problem, geometry), target.sm_count * geometry.min_blocks)
    own = (("PREFETCH", int(geometry.prefetch)), ("HOLD_GAMMA", int(geometry.hold_gamma)))
    main = Launch(
        Kernel("norm_backward.cuh", "norm_backward", _constants(problem, geometry) + own),
        (grid, 1, 1),
        (geometry.threads_per_row, geometry.rows_per_block, 1),
        align=16,
    )
    finish = _finish(problem, target, geometry.min_blocks)
    return BackwardPlan(main, finish, (problem.sums, grid, problem.cols))


def forward_geometry(problem: NormProblem, target: Target) -> ForwardShape:
    """A few very long rows are shared by all blocks. Others take the shape measured for this GPU,
    else are shared, else stream, else are held in registers, else take two launches.
    """
    shared = norm_resident.resident_choice(problem, target, "forward")
    if norm_split.few_rows(problem, target):
        return (
            shared
            or norm_staged_choice.few_rows_forward(problem, target)
            or norm_split.forward_split(problem)
        )
    return (
        _measured(problem, target, "forward")
        or shared
        or norm_ragged.forward_choice(problem, target)
        or norm_registers.forward_in_clusters(problem, target)
        or norm_staged_choice.forward_choice(problem, target)
        or norm_registers.forward_in_registers(problem, target)
        or norm_split.forward_split(problem)
    )


def backward_geometry(problem: NormProblem, target: Target) -> Shape:
    """As for the forward."""
    shared = norm_resident.resident_choice(problem, target, "backward")
    if norm_split.few_rows(problem, target):
        return shared or norm_split.backward_split(problem)
    measured = _measured(problem, target, "backward")
    return (
        (None if isinstance(measured, Ragged) else measured)
        or shared
        or norm_staged_choice.backward_choice(problem, target)
        or norm_registers.backward_in_registers(problem, target)
        or norm_split.backward_split(problem)
    )


def _measured(
    problem: NormProblem, target: Target, direction: str
) -> Geometry | Ragged | Staged | None:
    found = tuned.lookup(problem, target, direction)
    loads = 1 + problem.add + (direction == "backward")
    if isinstance(found, Staged) and not found.fits(problem, target, loads):
        return None
    if isinstance(found, Geometry | Ragged) and not found.fits(problem, target):
        return None
    return found


def _finish(problem: NormProblem, target: Target, partials_per_sm: float) -> Launch:
    """Narrow tiles where wide ones would leave multiprocessors idle; 8 floats are one sector.

    256 threads, and one batch of loads for the rows of partials that a large GPU writes, or one for
    each of its multiprocessors if that is fewer: the loads' latency, paid once, is most of the
    time. Of few rows of many columns a thread takes more, since there are threads enough.
    """
    at_once = math.ceil(_PARTIALS_AT_ONCE * min(1, partials_per_sm))
    tile = 32
    while tile > 8 and -(-problem.cols // tile) < target.sm_count:
        tile //= 2
    while at_once <= 34 and tile < 256 and problem.cols // tile >= 2 * target.sm_count:
        tile *= 2
    tile_rows = 256 // tile
    constants = (
        ("COLS", problem.cols),
        ("HAS_BETA", problem.sums - 1),
        ("TILE_COLS", tile),
        ("TILE_ROWS", tile_rows),
        ("BATCH", -(-at_once // tile_rows)),
    )
    return Launch(
        Kernel("norm_finish.cuh", "norm_finish", constants),
        (-(-problem.cols // tile), problem.sums, 1),
        (tile, tile_rows, 1),
        early=target.early_launches,
    )


def _finish_few(problem: NormProblem, target: Target) -> Launch:
    """For a few long rows of partials."""
    constants = (
        ("COLS", problem.cols),
        ("HAS_BETA", problem.sums - 1),
        ("TILE_COLS", 256),
        ("TILE_ROWS", 1),
        ("BATCH", 4),
    )
    return Launch(
        Kernel("norm_finish.cuh", "norm_finish", constants),
        (-(-problem.cols // 256), problem.sums, 1),
        (256, 1, 1),
        early=target.early_launches,
    )


def _constants(problem: NormProblem, geometry: Geometry) -> tuple[tuple[str, int], ...]:
    return (
        *constants_of(problem, problem.vector),
        ("THREADS_PER_ROW", geometry.threads_per_row),
        ("ROWS_PER_BLOCK", geometry.rows_per_block),
        ("MIN_BLOCKS", geometry.min_blocks),
    )


def _blocks(problem: NormProblem, geometry: Geometry) -> int:
    return -(-problem.rows // geometry.rows_per_block)
