"""Launch plans of the softmax kernels: pure functions of shapes, types and the GPU.

Short rows, and odd ones that 16-byte words do not cut well, go through shared memory, many at once
(`_tile`). Rows up to what the registers of a block, or of a cluster of blocks, hold are read once;
longer ones twice (`_long`).
"""

from dataclasses import dataclass, replace
from typing import Literal

from shardops.kernels.element_types import TYPE_BYTES, TYPE_CODES
from shardops.kernels.launch import MAX_GRID, Kernel, Launch
from shardops.kernels.target import Target

_TILE_THREADS = 256
_MAX_EACH = 32  # elements of a row that a thread of a tile holds
MAX_MASK_DIGITS = 3  # what the kernels' Params have room for
MAX_KEYS = 2**30  # columns are counted in 32 bits, some of them past the row's end

MaskKind = Literal[0, 1, 2]  # none; a byte a key; a byte a row


@dataclass(frozen=True)
class SoftmaxProblem:
    """What a softmax's launch depends on; all of it is static.

    Args:
      rows: queries, over all batch entries.
      x: dtype name.
      mask, digits: which kind, and how many digits make up its row (see `mask_rows`).
      causal: later keys are hidden; first: and an operand says which query row 0 is.
      sign: of the scale, -1, 0 or 1.
    """

    rows: int
    keys: int
    x: str
    mask: MaskKind = 0
    digits: int = 0
    causal: bool = False
    first: bool = False
    sign: int = 1

    @property
    def vector(self) -> int:
        """Elements in a 16-byte word."""
        return 16 // TYPE_BYTES[self.x]

    @property
    def even(self) -> bool:
        """Whether every row is whole words; else one more may cover it, as it lies."""
        return self.keys % self.vector == 0

    @property
    def words(self) -> int:
        """The most words that cover a row."""
        spare = 0 if self.even else self.vector - 1
        return -(-(self.keys + spare) // self.vector)


@dataclass(frozen=True)
class Geometry:
    """How a launch's threads lie over rows.

    Args:
      kind: which of the kernels.
      threads: a row; of a tile, a block.
      rows: a block, or a tile.
      parts: blocks a row. They are a cluster, unless there are two stages.
      min_blocks: blocks that must fit on a multiprocessor; bounds a thread's registers.
      hold: "registers", forward: weights are held from the sum to the result, not computed twice.
      group: "tile": threads a row.
      stages: "long": 2 where parts are merged by a second launch.
    """

    kind: Literal["registers", "tile", "long"]
    threads: int
    rows: int = 1
    parts: int = 1
    min_blocks: int = 1
    hold: bool = True
    group: int = 1
    stages: int = 1


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
    return _plan("softmax_forward", problem, geometry, constants, 1)


def backward_plan(
    problem: SoftmaxProblem, target: Target, geometry: Geometry | None = None
) -> Plan:
    """Plans the backward; of the problem's mask only the causal part counts."""
    problem = replace(problem, mask=0, digits=0, sign=1)
    geometry = geometry or backward_geometry(problem, target)
    return _plan("softmax_backward", problem, geometry, _constants(problem), 2)


def forward_geometry(problem: SoftmaxProblem, target: Target) -> Geometry:
    """Four 16-byte words a thread and two blocks a multiprocessor: one loads, the other computes.

    Where that takes more blocks a row than a cluster has: eight words and one block.
    """
    odd, masked = not problem.even, problem.mask > 0
    return (
        _tile(problem, 1)
        or _registers(problem, target, 4, _resident(problem, odd or masked), 2)
        or _registers(problem, target, 8, 384 if odd or masked else 512, 1)
        or _long(problem, target, _resident(problem, odd or masked or problem.causal))
    )


def backward_geometry(problem: SoftmaxProblem, target: Target) -> Geometry:
    """As forward, of two operands."""
    resident = _resident(problem, not problem.even, problem.causal)
    return (
        _tile(problem, 2)
        or _registers(problem, target, 4, resident, 2)
        or _registers(problem, target, 4, resident, 1)
        or _long(problem, target, resident)
    )


def mask_rows(shape: tuple[int, ...], mask: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Which row of a mask goes with a row of x: digits of the row's number, most significant first.

    Args:
      shape, mask: the dims before the keys; each of the mask's is 1 or that of x.
    Returns: (rows of x below the digit, its values) pairs: the digit is row // below % values.
    """
    digits: list[tuple[int, int]] = []
    below = 1
    joins = False  # the dim to the right belongs to the last digit
    for size, own in zip(reversed(shape), reversed(mask), strict=True):
        if size == 1:
            continue
        if own != 1 and joins:
            digits[-1] = (digits[-1][0], digits[-1][1] * size)
        elif own != 1:
            digits.append((below, size))
        joins = own != 1
        below *= size
    return tuple(reversed(digits))


def _tile(problem: SoftmaxProblem, operands: int) -> Geometry | None:
    """Where words cut rows badly: unaligned rows up to 1024 keys, and short ones."""
    threads_for_words = max(4, 1 << (-(-problem.words // 4) - 1).bit_length())
    slots = threads_for_words * -(-problem.words // threads_for_words)
    suits_words = problem.even and problem.words >= 16 and problem.words >= 0.8 * slots
    if suits_words or problem.keys > 32 * _MAX_EACH:
        return None
    group = 1
    while group < 32 and -(-problem.keys // group) > 8:
        group *= 2
    teams = _TILE_THREADS // group
    words_wanted = _TILE_THREADS * 4 // operands
    rows = teams * max(1, words_wanted * problem.vector // (teams * problem.keys))
    each = -(-problem.keys // group)
    registers = 28 + each * operands + 16 * problem.causal + (16 + each // 2) * (problem.mask > 0)
    min_blocks = min(6, 65536 // (_TILE_THREADS * registers))
    return Geometry("tile", _TILE_THREADS, rows=rows, min_blocks=min_blocks, group=group)


def _registers(
    problem: SoftmaxProblem, target: Target, each: int, resident: int, least_blocks: int
) -> Geometry | None:
    """The fewest blocks a row that hold it; more where few rows leave multiprocessors idle.

    Args:
      each: words a thread.
      resident: threads a multiprocessor, whose registers they share; least_blocks: that they make.
    """
    sizes = [n for n in _clusters(target) if problem.words <= n * each * (resident // least_blocks)]
    if not sizes:
        return None
    parts = sizes[0]
    for more in sizes[1:]:
        if more * problem.rows <= target.sm_count and problem.words >= more * 512:
            parts = more
    words = -(-problem.words // parts)
    if words <= 32 * each and parts == 1:
        threads = max(4, 1 << (-(-words // each) - 1).bit_length())
        return Geometry("registers", threads, 128 // threads, 1, resident // 128)
    threads = -(-words // (32 * each)) * 32
    rows = max(1, 128 // threads) if parts == 1 else 1
    return Geometry("registers", threads, rows, parts, resident // (threads * rows))


def _clusters(target: Target) -> tuple[int, ...]:
    """Sizes of clusters that the GPU launches, from 1 on."""
    number = target.arch.removeprefix("sm_")
    capability = int(number) if number.isdigit() else 0
    if capability < 90:
        return (1,)
    # 16 is more than the portable 8: the data-centre GPUs have it.
    return (1, 2, 4, 8, 16) if capability < 120 else (1, 2, 4, 8)


def _resident(problem: SoftmaxProblem, *takes_registers: bool) -> int:
    """Threads a multiprocessor, by how many of these it has: odd rows, a mask or a bound.

    Fewer for float16, whose conversions take a few registers.
    """
    return (1024, 768, 640)[sum(takes_registers)] - 128 * (problem.x == "float16")


def _long(problem: SoftmaxProblem, target: Target, resident: int) -> Geometry:
    """A cluster a row where there are some, else enough blocks to fill the GPU."""
    parts, stages = _clusters(target)[-1], 1
    if parts == 1 and problem.rows < 2 * target.sm_count:
        parts = min(64, -(-2 * target.sm_count // problem.rows), -(-problem.words // 2048))
        stages = min(2, parts)
    return Geometry("long", resident // 2, parts=parts, min_blocks=2, stages=stages)


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
        shared = _exchange_bytes(geometry, geometry.parts)
        return Plan((Launch(kernel, (grid, 1, 1), block, cluster, shared),))
    launches = []
    for stage in (0,) if geometry.stages == 1 else (1, 2):
        kernel = Kernel(f"{name}_long.cuh", f"{name}_long", (*constants, ("STAGE", stage)))
        parts = geometry.parts if stage == 0 else 1
        shared = _exchange_bytes(geometry, parts) if stage < 2 else 0
        launches.append(Launch(kernel, (grid, 1, 1), block, (parts, 1, 1), shared))
    workspace = (problem.rows, geometry.parts, 2) if geometry.stages == 2 else None
    return Plan(tuple(launches), workspace)


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
