"""Launch plans of the softmax kernels: pure functions of shapes, types and the GPU."""

from dataclasses import dataclass, replace

from shardops.kernels.element_types import TYPE_BYTES, TYPE_CODES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.sizes import round_up
from shardops.kernels.softmax_geometry import Geometry, backward_geometry, forward_geometry
from shardops.kernels.softmax_problem import (
    MAX_KEYS,
    MAX_MASK_DIGITS,
    MaskKind,
    SoftmaxProblem,
    mask_rows,
)
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
    constants = (*_constants(problem), ("SCALE_SIGN", problem.sign))
    if geometry.kind == "registers":
        constants += (("HOLD", int(geometry.hold)),)
    return _plan("softmax_forward", problem, target, geometry, constants, 1)


def backward_plan(
    problem: SoftmaxProblem, target: Target, geometry: Geometry | None = None
) -> Plan:
    """Plans the backward; of the problem's mask only the causal part counts."""
    problem = replace(problem, mask=0, digits=0, sign=1)
    geometry = geometry or backward_geometry(problem, target)
    return _plan("softmax_backward", problem, target, geometry, _constants(problem), 2)


def _plan(
    name: str,
    problem: SoftmaxProblem,
    target: Target,
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
        shared = _exchange_bytes(geometry, geometry.parts)
        return Plan((Launch(kernel, (grid, 1, 1), block, cluster, shared),))
    if geometry.kind == "staged":
        shared = _staged_bytes(geometry, operands)
        constants += (
            ("BATCH", geometry.batch),
            ("DEPTH", geometry.depth),
            ("SHARED_BYTES", shared),
        )
        kernel = Kernel(f"{name}_staged.cuh", f"{name}_staged", constants)
        at_once = min(blocks, MAX_GRID // geometry.parts)
        if geometry.depth > geometry.chunks(problem):  # there is room for some of the next row
            resident = geometry.min_blocks * target.sm_count
            at_once = min(at_once, max(1, resident // geometry.parts))
        cluster = (geometry.parts, 1, 1)
        return Plan((Launch(kernel, (at_once * geometry.parts, 1, 1), block, cluster, shared),))
    launches = []
    for stage in (0,) if geometry.stages == 1 else (1, 2):
        kernel = Kernel(f"{name}_long.cuh", f"{name}_long", (*constants, ("STAGE", stage)))
        parts = geometry.parts if stage == 0 else 1
        shared = _exchange_bytes(geometry, parts) if stage < 2 else 0
        launches.append(Launch(kernel, (grid, 1, 1), block, (parts, 1, 1), shared))
    workspace = (problem.rows, geometry.parts, 2) if geometry.stages == 2 else None
    return Plan(tuple(launches), workspace)


def _staged_bytes(geometry: Geometry, operands: int) -> int:
    """Shared memory of a "staged" block: barriers and counters, the exchange, and the chunks."""
    control = round_up(20 * geometry.depth, 16) + _exchange_bytes(geometry, geometry.parts)
    chunk = 16 * geometry.batch * geometry.threads * operands
    return round_up(control, 128) + geometry.depth * chunk


def _exchange_bytes(geometry: Geometry, cluster: int) -> int:
    """Shared memory of the kernels' Exchange: two buffers of pairs of floats."""
    warps = geometry.threads // 32
    pairs = (geometry.rows * warps if warps > 1 else 0) + (cluster if cluster > 1 else 0)
    return 16 * pairs


def _constants(problem: SoftmaxProblem) -> tuple[tuple[str, int], ...]:
    return (
        ("COLS", problem.keys),
        ("X_TYPE", TYPE_CODES[problem.x]),
        ("MASK", problem.mask),
        ("MASK_DIGITS", problem.digits),
        ("CAUSAL", int(problem.causal)),
        ("FIRST", int(problem.first)),
        ("WIDE_ROWS", int(problem.rows >= 2**31)),
    )
