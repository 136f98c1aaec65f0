"""Launches of the norms that quantise along rows of whole words of 16 bytes.

Blocks take rows in turn, and fetch the next ones while they work on one; gamma and beta stay in
registers.
"""

from dataclasses import dataclass

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of, register_limit
from shardops.kernels.norm_staged import has_staged_kernels
from shardops.kernels.quantize_plan import QuantizeProblem, written_constants
from shardops.kernels.sizes import round_up
from shardops.kernels.target import BLOCK_RESERVE, Target


@dataclass(frozen=True)
class Rows:
    """How a block's threads lie over rows.

    Args:
      threads_per_row: a power of two up to 32, or whole warps: then a block has one row at a time.
      min_blocks: blocks resident on a multiprocessor.
      stages: rows in shared memory.
      cluster: blocks that share a row.
      open: gamma and beta are held in float32.
    """

    threads_per_row: int
    rows_per_block: int
    min_blocks: int
    stages: int
    cluster: int = 1
    open: bool = False

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block

    def chunk(self, norm: NormProblem) -> int:
        """Columns of a row that a block has: whole blocks of scales."""
        return norm.cols if self.cluster == 1 else round_up(-(-norm.cols // self.cluster), 128)

    def per_thread(self, norm: NormProblem) -> int:
        """Vectors."""
        return -(-(self.chunk(norm) // norm.vector) // self.threads_per_row)

    def shared_bytes(self, norm: NormProblem) -> int:
        """Of `Buffers` in csrc/kernels/norm_quantized_rows.cuh."""
        words = 16 * self.stages * self.per_thread(norm) * self.threads
        parts = self.cluster * self.threads_per_row // 32 if self.threads_per_row > 32 else 1
        return words + round_up(2 * 8 * parts + 2 * 8, 16)

    def registers(self, norm: NormProblem) -> int:
        """That a thread takes at most: a row's values, gamma and beta, and what goes beside."""
        types = ["float32" if self.open else of for of in (norm.gamma, norm.beta) if of]
        held = 4 + sum(TYPE_BYTES[of] for of in types)  # bytes an element
        return self.per_thread(norm) * norm.vector * held // 4 + 28

    def fits(self, norm: NormProblem, target: Target) -> bool:
        room = target.shared_bytes + BLOCK_RESERVE
        resident = self.threads * self.min_blocks
        return (
            norm.cols > (self.cluster - 1) * self.chunk(norm)
            and self.cluster <= target.cluster_blocks
            and resident <= target.threads_per_sm
            and self.registers(norm) <= register_limit(resident)
            and (self.shared_bytes(norm) + BLOCK_RESERVE) * self.min_blocks <= room
        )


def rows_of(
    norm: NormProblem,
    written: QuantizeProblem,
    target: Target,
    threads: int,
    cluster: int = 1,
    open: bool = True,
    stages: int = 2,
) -> Rows | None:
    """With so many threads a row, and as many blocks as there is room for; None: for none."""
    lanes = max(1, written.block // norm.vector)
    wide = threads > 32
    if written.as_columns or written.scales == "square" or norm.add or norm.vector < norm.word:
        return None
    if lanes > 32 or threads % lanes or (cluster > 1 and not wide):
        return None
    for blocks in range(16, 0, -1):
        found = Rows(threads, 1 if wide else 128 // threads, blocks, stages, cluster, open)
        if found.fits(norm, target):
            return found
    return None


def rows_choice(norm: NormProblem, written: QuantizeProblem, target: Target) -> Rows | None:
    """Where it is faster than tiles, or rows in registers; as measured, docs/measured.md.

    Threads are a power of two, with 4 to 8 vectors each: fewer leave too few warps, and sums of
    more cost more than vectors that not all of them own. LayerNorm's gamma and beta of 6 vectors
    take too many registers in float32; clusters of 8 wait less where more of them are resident.
    """
    layer, cols = norm.kind == "layer", norm.cols
    if not has_staged_kernels(target) or norm.x == "float32":
        return None
    power_of_two = cols & (cols - 1) == 0
    tiles = cols <= 16384 if written.scales == "tensor" else power_of_two and cols <= 8192
    if cols < (256 if layer else 1024) or (tiles and not layer):
        return None
    cluster = 1 if cols <= 20480 else 8 if layer and cols > 40960 else 2
    vectors = Rows(1, 1, 1, 1, cluster).chunk(norm) // norm.vector
    lanes = max(1, written.block // norm.vector)
    threads = min(512, max(lanes, 1 << (int(vectors / 3.9).bit_length() - 1)))
    shape = rows_of(norm, written, target, threads, cluster)
    if shape is None or cluster == 8 or (layer and shape.per_thread(norm) == 6):
        return rows_of(norm, written, target, threads, cluster, open=False)
    return shape


def rows_launch(norm: NormProblem, written: QuantizeProblem, target: Target, shape: Rows) -> Launch:
    """Plans the launch: no more blocks than there are at once."""
    shared = shape.shared_bytes(norm)
    own = (c for c in written_constants(written) if c[0] != "BLOCKS_FIRST")
    constants = (
        *constants_of(norm, norm.vector),
        *own,
        ("THREADS_PER_ROW", shape.threads_per_row),
        ("ROWS_PER_BLOCK", shape.rows_per_block),
        ("CLUSTER", shape.cluster),
        ("CHUNK", shape.chunk(norm)),
        ("STAGES", shape.stages),
        ("OPEN", int(shape.open)),
        ("SHARED_BYTES", shared),
        ("MIN_BLOCKS", shape.min_blocks),
    )
    resident = target.resident_clusters(shape.cluster, shape.min_blocks)
    rows = -(-norm.rows // shape.rows_per_block)  # that blocks take at once
    blocks = -(-rows // -(-rows // resident))  # each as many turns as the others
    return Launch(
        Kernel("norm_quantized_rows.cuh", "norm_quantized_rows", constants),
        (blocks * shape.cluster, 1, 1),
        (shape.threads_per_row, shape.rows_per_block, 1),
        cluster=(shape.cluster, 1, 1),
        shared_bytes=shared,
        zeroed=((1 if written.scales == "tensor" else 2),) * written.amax,
    )
