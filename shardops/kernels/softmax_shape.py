"""Launch shapes of the softmax kernels, and what those in shared memory take of it."""

from dataclasses import dataclass
from typing import Literal

from shardops.kernels.sizes import round_up
from shardops.kernels.softmax_problem import SoftmaxProblem
from shardops.kernels.target import BLOCK_RESERVE, Target


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
      batch: "staged": words of a chunk that a thread has.
    """

    kind: Literal["registers", "tile", "staged", "long"]
    threads: int
    rows: int = 1
    parts: int = 1
    min_blocks: int = 1
    hold: bool = True
    group: int = 1
    stages: int = 1
    batch: int = 1

    def chunks(self, problem: SoftmaxProblem) -> int:
        """Of a row's part, in a "staged" block."""
        words = -(-problem.words // self.parts)
        return -(-words // (self.threads * self.batch))


def has_clusters(target: Target) -> bool:
    """Whether blocks can share a row, and copies run beside threads."""
    return target.cluster_blocks > 1


def clusters(target: Target) -> tuple[int, ...]:
    """Sizes of clusters that the GPU launches, from 1 on."""
    return tuple(1 << i for i in range(target.cluster_blocks.bit_length()))


def staged_bytes(geometry: Geometry, problem: SoftmaxProblem, operands: int) -> int:
    """Shared memory of a "staged" block: the exchange, a barrier a chunk, and the chunks."""
    chunks = geometry.chunks(problem)
    control = exchange_bytes(geometry, geometry.parts) + 8 * chunks
    words = chunks * geometry.threads * geometry.batch
    return round_up(control, 128) + words * _word_bytes(geometry, problem, operands)


def fits(geometry: Geometry, problem: SoftmaxProblem, target: Target, operands: int) -> bool:
    """Whether as many blocks as `min_blocks` share a multiprocessor's memory."""
    block = staged_bytes(geometry, problem, operands) + BLOCK_RESERVE
    return geometry.min_blocks * block <= target.shared_bytes + BLOCK_RESERVE


def exchange_bytes(geometry: Geometry, cluster: int) -> int:
    """Shared memory of the kernels' Exchange: two buffers of pairs of floats, and barriers."""
    warps = geometry.threads // 32
    if cluster > 1:
        return 16 * cluster * warps + 16
    return 16 * geometry.rows * warps if warps > 1 else 0


def _word_bytes(geometry: Geometry, problem: SoftmaxProblem, operands: int) -> int:
    """Of a word of each operand, and of its bytes of a mask where those are copied too."""
    on_words = problem.keys % 16 == 0
    if geometry.parts > 1:
        on_words = on_words and -(-problem.words // geometry.parts) * problem.vector % 16 == 0
    return 16 * operands + problem.vector * (problem.mask == 1 and on_words)
