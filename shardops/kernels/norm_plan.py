"""Launch plans of the norm kernels: pure functions of shapes, types and the GPU.

A row is cut into vectors of up to 16 bytes. Rows whose vectors fit in the registers of one block
take the kernels that read them once; longer rows take the `_long` kernels, which read them twice.
On sm_90 and newer, rows stream through shared memory (norm_staged.py) where that is faster.
"""

from dataclasses import dataclass

from shardops.kernels import norm_staged, tuned
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of, register_limit, round_up
from shardops.kernels.norm_staged import Staged, staged_backward, staged_forward
from shardops.kernels.target import Target

_LONG_THREADS = 1024
_PARTIALS_AT_ONCE = 136


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


def forward_plan(
    problem: NormProblem, target: Target, geometry: Geometry | Staged | None = None
) -> Launch:
    """Plans the forward launch; `geometry` overrides the one chosen, for tuning."""
    geometry = geometry or forward_geometry(problem, target)
    if isinstance(geometry, Staged):
        return staged_forward(problem, target, geometry)
    name = "norm_forward_long" if geometry.long else "norm_forward"
    constants = _constants(problem, geometry) + (("STREAM", 1),) * (not geometry.long)
    grid = min(_blocks(problem, geometry), MAX_GRID)
    return Launch(
        Kernel(f"{name}.cuh", name, constants),
        (grid, 1, 1),
        (geometry.threads_per_row, geometry.rows_per_block, 1),
    )


def backward_plan(
    problem: NormProblem, target: Target, geometry: Geometry | Staged | None = None
) -> BackwardPlan:
    """Plans the backward launch and the sum of its partials."""
    geometry = geometry or backward_geometry(problem, target)
    if isinstance(geometry, Staged):
        main, partials = staged_backward(problem, target, geometry)
        return BackwardPlan(main, _finish(problem, target), (problem.sums, partials, problem.cols))
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


def forward_geometry(problem: NormProblem, target: Target) -> Geometry | Staged:
    """The shape measured for this GPU, else rows in registers, else streamed, else read twice."""
    return (
        _measured(problem, target, "forward")
        or norm_staged.forward_choice(problem, target)
        or _forward_in_registers(problem)
        or Geometry(threads_per_row=_LONG_THREADS, long=True)
    )


def backward_geometry(problem: NormProblem, target: Target) -> Geometry | Staged:
    """The shape measured for this GPU, else streamed rows, else in registers, else read twice."""
    return (
        _measured(problem, target, "backward")
        or norm_staged.backward_choice(problem, target)
        or _backward_in_registers(problem, target)
        or Geometry(threads_per_row=_LONG_THREADS, long=True)
    )


def _measured(problem: NormProblem, target: Target, direction: str) -> Geometry | Staged | None:
    fields = tuned.lookup(problem, target, direction)
    if fields is None:
        return None
    return Staged(**fields) if "stages" in fields else Geometry(**fields)


def _forward_in_registers(problem: NormProblem) -> Geometry | None:
    """As few threads a row as reach the memory's speed: 32 to 64 bytes each, more where LayerNorm
    sums twice and short rows fit a warp.

    1024 threads a multiprocessor; the register bound that comes with it makes LayerNorm up to a
    third faster than none.
    """
    wide = problem.registers(problem.x) == 4
    if wide and problem.vectors <= 256 and problem.kind == "layer":
        threads = min(32, max(1, 1 << (-(-problem.vectors // 4) - 1).bit_length()))
        threads = 16 if threads == 8 and problem.vectors > 16 else threads
        rows = 128 // threads
        return Geometry(threads, rows, 8 if problem.vectors <= 128 else 4)
    if problem.vectors <= 64 and wide:
        threads = 1 << (-(-problem.vectors // 2) - 1).bit_length()
        return Geometry(threads, max(1, 128 // threads), 8)
    short = _short_rows(problem)
    if short is not None:
        return short
    # Narrow vectors hold less each, so more of them keep as many bytes in flight.
    choices = (8, 16, 32) if problem.registers(problem.x) == 1 else (4, 8)
    if wide and problem.kind == "rms":
        choices = (2, *choices) if problem.vectors <= 384 else choices
        choices = (3, *choices) if problem.vectors > 1024 else choices
    elif wide and problem.vectors > 1024:
        choices = (8,)
    for per_thread in choices:
        threads = _warps(problem.vectors, per_thread)
        registers = per_thread * problem.registers(problem.x)
        if threads <= (512 if registers > 24 else 1024):
            rows_per_block = max(1, 128 // threads)
            resident = 768 if registers > 24 else 1024
            if registers > 24 and problem.registers(problem.gamma) > 4:
                resident = 512  # gamma and beta in float32 take more than the row
            resident //= (1 + problem.add) * threads * rows_per_block
            return Geometry(threads, rows_per_block, max(1, resident))
    return None


def _backward_in_registers(problem: NormProblem, target: Target) -> Geometry | None:
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
    return None


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
    needed += 8 * (target.arch in ("sm_100", "sm_103"))  # whose ptxas takes a few more
    # Unpacked rows need little beside what the source says.
    packed = problem.x != "float32" and problem.vector > 1
    needed = needed * (percent if packed else 116) // 100
    block = threads * rows_per_block
    blocks = min(target.threads_per_sm // block, 16)
    while blocks and register_limit(block * blocks) < needed:
        blocks -= 1
    return Geometry(threads, rows_per_block, blocks, False, prefetch, hold_gamma)


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
    """Narrow tiles where wide ones would leave multiprocessors idle; 8 floats are one sector.

    256 threads, and one batch of loads for as many rows of partials as a large GPU has
    multiprocessors: the loads' latency, paid once, is most of the time.
    """
    tile = 32
    while tile > 8 and -(-problem.cols // tile) < target.sm_count:
        tile //= 2
    tile_rows = 256 // tile
    constants = (
        ("COLS", problem.cols),
        ("HAS_BETA", problem.sums - 1),
        ("TILE_COLS", tile),
        ("TILE_ROWS", tile_rows),
        ("BATCH", -(-_PARTIALS_AT_ONCE // tile_rows)),
    )
    return Launch(
        Kernel("norm_finish.cuh", "norm_finish", constants),
        (-(-problem.cols // tile), problem.sums, 1),
        (tile, tile_rows, 1),
    )


def _constants(problem: NormProblem, geometry: Geometry) -> tuple[tuple[str, int], ...]:
    return (
        *constants_of(problem),
        ("THREADS_PER_ROW", geometry.threads_per_row),
        ("ROWS_PER_BLOCK", geometry.rows_per_block),
        ("MIN_BLOCKS", geometry.min_blocks),
    )


def _blocks(problem: NormProblem, geometry: Geometry) -> int:
    return -(-problem.rows // geometry.rows_per_block)


def _warps(vectors: int, per_thread: int) -> int:
    """Threads, in whole warps, that own at most `per_thread` vectors each."""
    return round_up(-(-vectors // per_thread), 32)
