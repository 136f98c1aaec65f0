"""Launch plans of the norm kernels: pure functions of shapes, types and the GPU.

A row is cut into vectors of up to 16 bytes. Rows whose vectors fit in the registers of one block
take the kernels that read them once; longer rows take the `_long` kernels, which read them twice.
"""

from dataclasses import dataclass
from typing import Literal

from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.target import Target

_TYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
_TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_GRID = 2**31 - 1
_LONG_THREADS = 1024


@dataclass(frozen=True)
class NormProblem:
    """What a norm's launch depends on; all of it is static.

    Args:
      x, gamma, beta: dtype names; beta is None where there is none.
      add: forward: a residual is added first; backward: its cotangent is added last.
    """

    rows: int
    cols: int
    kind: Literal["layer", "rms"]
    x: str
    gamma: str
    beta: str | None = None
    add: bool = False
    zero_centered: bool = False

    @property
    def vector(self) -> int:
        """Elements in the widest word that cuts every row evenly."""
        length = 16 // _TYPE_BYTES[self.x]
        while self.cols % length:
            length //= 2
        return length

    @property
    def vectors(self) -> int:
        return self.cols // self.vector

    @property
    def sums(self) -> int:
        """Parameter gradients: dgamma, and dbeta where there is a beta."""
        return 1 + (self.beta is not None)

    def registers(self, dtype: str) -> int:
        """32-bit registers that one vector of `dtype` takes."""
        return max(1, self.vector * _TYPE_BYTES[dtype] // 4)


@dataclass(frozen=True)
class Geometry:
    """How a block's threads lie over rows.

    Args:
      long: rows are read twice, one block a row.
      min_blocks: blocks that must fit on a multiprocessor; bounds a thread's registers.
      prefetch: the next row is loaded while this one is computed.
      hold_gamma: gamma stays in registers from row to row.
    """

    threads_per_row: int
    rows_per_block: int = 1
    min_blocks: int = 1
    long: bool = False
    prefetch: bool = False
    hold_gamma: bool = False


@dataclass(frozen=True)
class BackwardPlan:
    """Two launches; `workspace` is the float32 array [sums, blocks, cols] between them."""

    main: Launch
    finish: Launch
    workspace: tuple[int, int, int]


def forward_plan(problem: NormProblem, target: Target, geometry: Geometry | None = None) -> Launch:
    """Plans the forward launch; `geometry` overrides the one chosen, for tuning."""
    geometry = geometry or forward_geometry(problem)
    name = "norm_forward_long" if geometry.long else "norm_forward"
    constants = _constants(problem, geometry) + (("STREAM", 1),) * (not geometry.long)
    grid = min(_blocks(problem, geometry), _MAX_GRID)
    return Launch(
        Kernel(f"{name}.cuh", name, constants),
        (grid, 1, 1),
        (geometry.threads_per_row, geometry.rows_per_block, 1),
    )


def backward_plan(
    problem: NormProblem, target: Target, geometry: Geometry | None = None
) -> BackwardPlan:
    """Plans the backward launch and the sum of its partials."""
    geometry = geometry or backward_geometry(problem, target)
    grid = min(_blocks(problem, geometry), target.sm_count * geometry.min_blocks)
    if geometry.long:
        name, shared = "norm_backward_long", 4 * problem.sums * problem.cols
        if shared > target.shared_bytes - 2048:  # the reduction's own buffers
            shared = 0
        own = (("SHARED_SUMS", int(shared > 0)),)
    else:
        name, shared = "norm_backward", 0
        own = (("PREFETCH", int(geometry.prefetch)), ("HOLD_GAMMA", int(geometry.hold_gamma)))
    main = Launch(
        Kernel(f"{name}.cuh", name, _constants(problem, geometry) + own),
        (grid, 1, 1),
        (geometry.threads_per_row, geometry.rows_per_block, 1),
        shared_bytes=shared,
    )
    return BackwardPlan(main, _finish(problem, target), (problem.sums, grid, problem.cols))


def forward_geometry(problem: NormProblem) -> Geometry:
    """Four 16-byte vectors a thread and 1024 threads a multiprocessor.

    So many bytes in flight reach the memory's speed, and the register bound that comes with it
    makes LayerNorm up to a third faster than none.
    """
    short = _short_rows(problem)
    if short is not None:
        return short
    # Narrow vectors hold less each, so more of them keep as many bytes in flight.
    for per_thread in (4, 8) if problem.registers(problem.x) > 1 else (8, 16, 32):
        threads = _warps(problem.vectors, per_thread)
        registers = per_thread * problem.registers(problem.x)
        if threads <= (512 if registers > 24 else 1024):
            rows_per_block = max(1, 128 // threads)
            resident = 1024 // (threads * rows_per_block)
            if registers > 24 or problem.add:
                resident //= 2
            return Geometry(threads, rows_per_block, max(1, resident))
    return Geometry(threads_per_row=_LONG_THREADS, long=True)


def backward_geometry(problem: NormProblem, target: Target) -> Geometry:
    """The next row is prefetched, and few threads share a row.

    Few threads make the reduction cheap, the prefetch keeps the memory busy during it; 24 elements
    a thread was best or near it on the shapes of docs/measured.md, if 8 warps stay resident. Rows
    for which that needs too many registers give up gamma first, then the prefetch.
    """
    short = _short_rows(problem)
    if short is not None:
        return _resident(problem, target, short.threads_per_row, short.rows_per_block, 110)
    for luxuries in ((True, True), (True, False), (False, False)):
        for elements, percent in _CHOICES:
            per_thread = max(1, elements // problem.vector)
            threads = _warps(problem.vectors, per_thread)
            if threads > 768:
                continue
            rows_per_block = max(1, 128 // threads)
            found = _resident(problem, target, threads, rows_per_block, percent, *luxuries)
            resident_threads = threads * found.rows_per_block * found.min_blocks
            if resident_threads >= 256:
                return found
    return Geometry(threads_per_row=_LONG_THREADS, long=True)


def _resident(
    problem: NormProblem,
    target: Target,
    threads: int,
    rows_per_block: int,
    percent: int,
    prefetch: bool = True,
    hold_gamma: bool = True,
) -> Geometry:
    """Fills a multiprocessor with as many blocks as registers and threads allow; 0 if not one."""
    per_thread = -(-problem.vectors // threads)
    needed = _held_registers(problem, per_thread, prefetch, hold_gamma)
    # Unpacked rows need little beside what the source says.
    packed = problem.x != "float32" and problem.vector > 1
    needed = needed * (percent if packed else 108) // 100
    block = threads * rows_per_block
    blocks = min(target.threads_per_sm // block, 16)
    while blocks and _register_limit(block * blocks) < needed:
        blocks -= 1
    return Geometry(threads, rows_per_block, blocks, False, prefetch, hold_gamma)


def _register_limit(resident_threads: int) -> int:
    """Registers a thread may have: warps are dealt to 4 schedulers, 512 registers a lane each."""
    warps_per_scheduler = -(-resident_threads // 128)
    return min(255, 512 // warps_per_scheduler // 8 * 8)


# Elements a thread, best first, and the registers that ptxas wants for them, in percent of those
# that the source holds. At 24 it makes do with less, at some cost; that still beats fewer elements.
# The test of compiled kernels fails where a plan makes one spill.
_CHOICES = ((24, 120), (24, 94), (32, 140), (16, 114), (8, 110))


def _held_registers(problem: NormProblem, per_thread: int, prefetch: bool, hold_gamma: bool) -> int:
    """The registers that a thread's variables take: rows, sums, gamma, and addresses."""
    row = per_thread * problem.registers(problem.x)
    sums = per_thread * problem.vector * problem.sums
    gamma = per_thread * problem.registers(problem.gamma)
    return 28 + sums + row * (2 + 2 * prefetch + problem.add) + gamma * hold_gamma


def _short_rows(problem: NormProblem) -> Geometry | None:
    """Rows of at most a warp of vectors: several rows a warp, 256 threads a block."""
    if problem.vectors > 32:
        return None
    threads = 1 << (problem.vectors - 1).bit_length()
    return Geometry(threads_per_row=threads, rows_per_block=256 // threads)


def _finish(problem: NormProblem, target: Target) -> Launch:
    """Narrow tiles where wide ones would leave multiprocessors idle; 8 floats are one sector."""
    tile = 32
    while tile > 8 and -(-problem.cols // tile) < target.sm_count:
        tile //= 2
    constants = (
        ("COLS", problem.cols),
        ("HAS_BETA", problem.sums - 1),
        ("TILE_COLS", tile),
        ("TILE_ROWS", 1024 // tile),
    )
    return Launch(
        Kernel("norm_finish.cuh", "norm_finish", constants),
        (-(-problem.cols // tile), problem.sums, 1),
        (tile, 1024 // tile, 1),
    )


def _constants(problem: NormProblem, geometry: Geometry) -> tuple[tuple[str, int], ...]:
    return (
        ("COLS", problem.cols),
        ("VECTOR", problem.vector),
        ("X_TYPE", _TYPE_CODES[problem.x]),
        ("GAMMA_TYPE", _TYPE_CODES[problem.gamma]),
        ("BETA_TYPE", _TYPE_CODES[problem.beta or "float32"]),
        ("LAYER", int(problem.kind == "layer")),
        ("HAS_BETA", problem.sums - 1),
        ("HAS_ADD", int(problem.add)),
        ("ZERO_CENTERED", int(problem.zero_centered)),
        ("THREADS_PER_ROW", geometry.threads_per_row),
        ("ROWS_PER_BLOCK", geometry.rows_per_block),
        ("MIN_BLOCKS", geometry.min_blocks),
    )


def _blocks(problem: NormProblem, geometry: Geometry) -> int:
    return -(-problem.rows // geometry.rows_per_block)


def _warps(vectors: int, per_thread: int) -> int:
    """Threads, in whole warps, that own at most `per_thread` vectors each."""
    return _round_up(-(-vectors // per_thread), 32)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
