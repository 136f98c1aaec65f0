"""Launch shapes of the norm kernels that hold rows in registers."""

from dataclasses import dataclass

from shardops.kernels.launch import MAX_GRID
from shardops.kernels.norm_problem import MOST_HELD, NormProblem, register_limit
from shardops.kernels.sizes import round_up
from shardops.kernels.target import Target


@dataclass(frozen=True)
class Geometry:
    """How a block's threads lie over rows.

    Args:
      min_blocks: blocks that must fit on a multiprocessor; bounds a thread's registers.
      prefetch: the next row is loaded while this one is computed.
      hold_gamma: gamma stays in registers from row to row; in a cluster it is loaded with the row.
      cluster: forward: blocks that share a row, which then have one each.
    """

    threads_per_row: int
    rows_per_block: int = 1
    min_blocks: int = 1
    prefetch: bool = False
    hold_gamma: bool = False
    cluster: int = 1

    def chunk(self, problem: NormProblem) -> int:
        """Columns of a row that a block owns."""
        return -(-problem.vectors // self.cluster) * problem.vector

    def fits(self, problem: NormProblem, target: Target) -> bool:
        """Whether each warp owns a part of the row, threads hold it, and such clusters exist."""
        held = -(-problem.vectors // (self.threads_per_row * self.cluster)) * problem.registers(
            problem.x
        )
        resident = self.threads_per_row * self.rows_per_block * self.min_blocks
        if held > MOST_HELD or resident > target.threads_per_sm:
            return False
        of_last = problem.vectors - (self.cluster - 1) * -(-problem.vectors // self.cluster)
        if self.threads_per_row > 32 and of_last <= self.threads_per_row - 32:
            return False
        return self.cluster == 1 or (
            self.cluster <= target.cluster_blocks
            and self.threads_per_row > 32
            and self.rows_per_block == 1
            and problem.vector == problem.word
            and problem.rows * self.cluster <= MAX_GRID
        )


_TAKES_A_FEW_MORE = ("sm_100", "sm_103", "sm_120", "sm_121")  # registers, as their ptxas has it


def forward_in_registers(problem: NormProblem, target: Target) -> Geometry | None:
    """As few threads a row as reach the memory's speed: 32 to 64 bytes each, more where LayerNorm
    sums twice and short rows fit a warp.

    512 to 1024 threads a multiprocessor, as rows, gamma and beta leave registers; half of them with
    a residual. The bound of registers that comes with it makes LayerNorm up to a third faster.
    """
    wide = problem.registers(problem.x) == 4
    if wide and problem.vectors <= 8 and problem.add:
        # A word a thread, so that a warp's loads of both arrays leave no gaps.
        threads = 1 << (problem.vectors - 1).bit_length()
        return Geometry(threads, 128 // threads, 4)
    if wide and problem.vectors <= 256 and problem.kind == "layer":
        threads = min(32, max(1, 1 << (-(-problem.vectors // 4) - 1).bit_length()))
        threads = 16 if threads == 8 and problem.vectors > 16 else threads
        resident = 384 if problem.registers(problem.gamma) > 4 else 512
        if problem.vectors <= 128:
            most = 768 if problem.registers(problem.gamma) > 4 else 1024
            resident = min(most, _layer_norm_threads(problem, target, threads, 16))
        return Geometry(threads, 128 // threads, resident // 128)
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
            resident = 768 if registers > 24 or _takes_more(problem, target) else 1024
            if wide and problem.kind == "layer":
                resident = min(resident, _layer_norm_threads(problem, target, threads, registers))
                if problem.x == "float32" and registers > 24:
                    resident = min(resident, 640)
            if registers > 24 and problem.parameter_registers > 4:
                resident = 512  # gamma and beta in float32 take more than the row
            resident //= (1 + problem.add) * threads * rows_per_block
            return Geometry(threads, rows_per_block, max(1, resident))
    return None


def forward_in_clusters(problem: NormProblem, target: Target) -> Geometry | None:
    """Long rows: 64 elements of 16 bits a thread, in blocks so small that five are resident.

    LayerNorm without a residual would read gamma and beta, from the L2 cache for each row, as often
    as it moves anything else.
    """
    if problem.vectors < 2048 or (problem.kind == "layer" and not problem.add):
        return None
    cluster = 1 << (-(-problem.vectors // 1024) - 1).bit_length()
    threads = round_up(-(-problem.vectors // cluster // 8), 32)
    found = Geometry(threads, 1, 640 // threads, cluster=cluster)
    return found if found.fits(problem, target) else None


def _layer_norm_threads(problem: NormProblem, target: Target, threads: int, registers: int) -> int:
    """Resident threads that leave registers for gamma and beta, which are loaded ahead.

    To know which threads own the last vectors takes a few as well, and of long packed rows many
    where all but some of the last warp do. `registers`: of a row.
    """
    ends_early = problem.vectors % threads != 0
    ends_in_last_warp = problem.x != "float32" and 0 < -problem.vectors % threads < 32
    takes_a_few_more = target.arch in _TAKES_A_FEW_MORE
    if registers > 24 and (takes_a_few_more or ends_in_last_warp):
        return 512
    resident = 896 if takes_a_few_more else 1024
    return resident - 128 * (ends_early or problem.registers(problem.gamma) > 4)


def backward_in_registers(problem: NormProblem, target: Target) -> Geometry | None:
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
            if problem.vectors % 32 and any(luxuries) and not _takes_more(problem, target):
                percent = max(percent, _PERCENT_OF_ENDS)
            rows_per_block = max(1, 128 // threads)
            found = _resident(problem, target, threads, rows_per_block, percent, *luxuries)
            resident_threads = threads * found.rows_per_block * found.min_blocks
            if resident_threads >= 256:
                return found
    return None


def _takes_more(problem: NormProblem, target: Target) -> bool:
    """For sm_8x ptxas needs a few more registers where gamma takes more of them than the row."""
    wide = problem.registers(problem.gamma) > problem.registers(problem.x)
    return target.arch.startswith("sm_8") and wide


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
    needed += 8 * (target.arch in _TAKES_A_FEW_MORE)
    needed += (16 + 16 * problem.add) * _takes_more(problem, target)
    # Unpacked rows need little beside what the source says.
    packed = problem.x != "float32" and problem.vector > 1
    needed = needed * (percent if packed else 116) // 100
    block = threads * rows_per_block
    blocks = min(target.threads_per_sm // block, 16)
    while blocks and register_limit(block * blocks) < needed:
        blocks -= 1
    return Geometry(threads, rows_per_block, blocks, prefetch, hold_gamma)


# Elements a thread, best first, and the registers that ptxas wants for them, in percent of those
# that the source holds. At 24 it makes do with less, at some cost; that still beats fewer elements.
# The test of compiled kernels fails where a plan makes one spill.
_CHOICES = ((24, 120), (24, 94), (32, 140), (16, 114), (8, 110))
_PERCENT_OF_ENDS = 108  # at least, where a row ends within a warp


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


def _warps(vectors: int, per_thread: int) -> int:
    """Threads, in whole warps, that own at most `per_thread` vectors each."""
    return round_up(-(-vectors // per_thread), 32)
