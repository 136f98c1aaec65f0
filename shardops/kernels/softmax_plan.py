"""Launch plans of the softmax kernels: pure functions of shapes, types and the GPU."""

from dataclasses import dataclass, replace

from shardops.kernels.element_types import TYPE_BYTES, TYPE_CODES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.resident import Resident
from shardops.kernels.softmax_geometry import backward_geometry, forward_geometry
from shardops.kernels.softmax_problem import (
    MAX_KEYS,
    MAX_MASK_DIGITS,
    MaskKind,
    SoftmaxProblem,
    mask_rows,
    rows_to_next_place,
)
from shardops.kernels.softmax_resident import parts_of, resident_choice
from shardops.kernels.softmax_shape import Geometry, exchange_bytes, staged_bytes
from shardops.kernels.target import Target

__all__ = [
    "MAX_KEYS",
    "MAX_MASK_DIGITS",
    "Geometry",
    "MaskKind",
    "Plan",
    "SoftmaxProblem",
    "backward_geometry",
    "backward_plan",
    "forward_geometry",
    "forward_plan",
    "mask_rows",
]


@dataclass(frozen=True)
class Plan:
    """One launch or two; `workspace` [rows, parts, 2] is between the two, float32, or the last
    result of the one, uint32.
    """

    launches: tuple[Launch, ...]
    workspace: tuple[int, int, int] | None = None


def forward_plan(
    problem: SoftmaxProblem, target: Target, geometry: Geometry | Resident | None = None
) -> Plan:
    """Plans the forward; `geometry` overrides the one chosen, for tuning."""
    geometry = geometry or chosen_forward(problem, target)
    sign = (("SCALE_SIGN", problem.sign),)
    if isinstance(geometry, Resident):
        return _resident("softmax_forward", problem, target, geometry, sign, 1)
    constants = _constants(problem, geometry.parts) + sign
    if geometry.kind == "registers":
        constants += (("HOLD", int(geometry.hold)),)
    return _plan("softmax_forward", problem, geometry, constants, 1)


def backward_plan(
    problem: SoftmaxProblem, target: Target, geometry: Geometry | Resident | None = None
) -> Plan:
    """Plans the backward; of the problem's mask only the causal part counts."""
    problem = replace(problem, mask=0, digits=0, sign=1)
    geometry = geometry or chosen_backward(problem, target)
    if isinstance(geometry, Resident):
        return _resident("softmax_backward", problem, target, geometry, (), 2)
    return _plan("softmax_backward", problem, geometry, _constants(problem, geometry.parts), 2)


def chosen_forward(problem: SoftmaxProblem, target: Target) -> Geometry | Resident:
    """Rows that would be read twice are shared by all blocks, if they can be."""
    found = forward_geometry(problem, target)
    return (found.kind == "long" and resident_choice(problem, target, 1)) or found


def chosen_backward(problem: SoftmaxProblem, target: Target) -> Geometry | Resident:
    """As for the forward."""
    found = backward_geometry(problem, target)
    return (found.kind == "long" and resident_choice(problem, target, 2)) or found


def _resident(
    name: str,
    problem: SoftmaxProblem,
    target: Target,
    geometry: Resident,
    own: tuple[tuple[str, int], ...],
    operands: int,
) -> Plan:
    parts = parts_of(problem, target)
    shared = parts.shared_bytes(geometry, operands)
    constants = (
        *_constants(problem, 1),
        *parts.constants(geometry),
        ("PERIOD", rows_to_next_place(problem)),
        ("SHARED_BYTES", shared),
        *own,
    )
    launch = Launch(
        Kernel(f"{name}_resident.cuh", f"{name}_resident", constants),
        (parts.grid, 1, 1),
        (geometry.threads, 1, 1),
        shared_bytes=shared,
        zeroed=(1,),
        align=16,
        resident=True,
    )
    return Plan((launch,), (problem.rows, parts.grid, 2))


def _plan(
    name: str,
    problem: SoftmaxProblem,
    geometry: Geometry,
    constants: tuple[tuple[str, int], ...],
    operands: int,
) -> Plan:
    constants += (("MIN_BLOCKS", geometry.min_blocks),)
    if geometry.kind == "tile":
        constants += (
            ("THREADS", geometry.threads),
            ("GROUP", geometry.group),
            ("TILE_ROWS", geometry.rows),
        )
        shared = operands * geometry.rows * problem.keys * TYPE_BYTES[problem.x]
        grid = min(-(-problem.rows // geometry.rows), MAX_GRID)
        kernel = Kernel(f"{name}_tile.cuh", f"{name}_tile", constants)
        return Plan((Launch(kernel, (grid, 1, 1), (geometry.threads, 1, 1), shared_bytes=shared),))

    constants += (("THREADS_PER_ROW", geometry.threads), ("PARTS", geometry.parts))
    blocks = -(-problem.rows // geometry.rows)
    grid = min(blocks, MAX_GRID // geometry.parts) * geometry.parts
    block = (geometry.threads, geometry.rows, 1)
    if geometry.kind == "registers":
        kernel = Kernel(f"{name}.cuh", name, (*constants, ("ROWS_PER_BLOCK", geometry.rows)))
        cluster = (geometry.parts, 1, 1)
        shared = exchange_bytes(geometry, geometry.parts)
        return Plan((Launch(kernel, (grid, 1, 1), block, cluster, shared, align=16),))
    if geometry.kind == "staged":
        constants += (("BATCH", geometry.batch),)
        kernel = Kernel(f"{name}_staged.cuh", f"{name}_staged", constants)
        shared = staged_bytes(geometry, problem, operands)
        cluster = (geometry.parts, 1, 1)
        return Plan((Launch(kernel, (grid, 1, 1), block, cluster, shared),))
    launches = []
    for stage in (0,) if geometry.stages == 1 else (1, 2):
        kernel = Kernel(f"{name}_long.cuh", f"{name}_long", (*constants, ("STAGE", stage)))
        parts = geometry.parts if stage == 0 else 1
        shared = exchange_bytes(geometry, parts) if stage < 2 else 0
        launches.append(Launch(kernel, (grid, 1, 1), block, (parts, 1, 1), shared))
    workspace = (problem.rows, geometry.parts, 2) if geometry.stages == 2 else None
    return Plan(tuple(launches), workspace)


def _constants(problem: SoftmaxProblem, parts: int) -> tuple[tuple[str, int], ...]:
    return (
        ("COLS", problem.keys),
        ("X_TYPE", TYPE_CODES[problem.x]),
        ("MASK", problem.mask),
        ("MASK_DIGITS", problem.digits),
        ("CAUSAL", int(problem.causal)),
        ("FIRST", int(problem.first)),
        ("WIDE_ROWS", int(problem.rows * parts > MAX_GRID)),
    )
