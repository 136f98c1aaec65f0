"""Launch plans of the softmax kernels: pure functions of shapes, types and the GPU."""

from dataclasses import dataclass, replace

from shardops.kernels.element_types import TYPE_BYTES, TYPE_CODES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.softmax_geometry import backward_geometry, forward_geometry
from shardops.kernels.softmax_problem import (
    MAX_KEYS,
    MAX_MASK_DIGITS,
    MaskKind,
    SoftmaxProblem,
    mask_rows,
)
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
    """One launch; or two, and `workspace`: the float32 array [rows, parts, 2] between them."""

    launches: tuple[Launch, ...]
    workspace: tuple[int, int, int] | None = None


def forward_plan(problem: SoftmaxProblem, target: Target, geometry: Geometry | None = None) -> Plan:
    """Plans the forward; `geometry` overrides the one chosen, for tuning."""
    geometry = geometry or forward_geometry(problem, target)
    constants = (*_constants(problem, geometry), ("SCALE_SIGN", problem.sign))
    if geometry.kind == "registers":
        constants += (("HOLD", int(geometry.hold)),)
    return _plan("softmax_forward", problem, geometry, constants, 1)


def backward_plan(
    problem: SoftmaxProblem, target: Target, geometry: Geometry | None = None
) -> Plan:
    """Plans the backward; of the problem's mask only the causal part counts."""
    problem = replace(problem, mask=0, digits=0, sign=1)
    geometry = geometry or backward_geometry(problem, target)
    return _plan("softmax_backward", problem, geometry, _constants(problem, geometry), 2)


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


def _constants(problem: SoftmaxProblem, geometry: Geometry) -> tuple[tuple[str, int], ...]:
    return (
        ("COLS", problem.keys),
        ("X_TYPE", TYPE_CODES[problem.x]),
        ("MASK", problem.mask),
        ("MASK_DIGITS", problem.digits),
        ("CAUSAL", int(problem.causal)),
        ("FIRST", int(problem.first)),
        ("WIDE_ROWS", int(problem.rows * geometry.parts > MAX_GRID)),
    )
