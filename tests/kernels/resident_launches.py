"""What a launch whose blocks share rows (csrc/kernels/resident.cuh) counts on."""

import math

from shardops.kernels.launch import Launch
from shardops.kernels.target import Target


def check_resident(
    launch: Launch, target: Target, cols: int, itemsize: int, operands: int, own: int = 0
) -> None:
    """The static assertions, that all blocks fit on the GPU, and that the rows in shared memory do.

    Args:
      own: bytes a column that a block keeps beside the rows, where its workers' columns move on.
    """
    constants = dict(launch.kernel.constants)
    assert launch.resident
    blocks, largest = constants["BLOCKS"], constants["LARGEST"]
    assert launch.grid == (blocks, 1, 1)
    assert 1 <= largest <= blocks <= target.sm_count
    part, word = constants["PART_COLS"], 16 // itemsize
    before_last = (blocks - 1) * part - (blocks - 1 - min(largest, blocks - 1)) * 2 * word
    last = part - (blocks > largest) * 2 * word
    assert part % (2 * word) == 0
    assert before_last < cols <= before_last + last
    period = constants["PERIOD"]
    assert period == 16 // math.gcd(16, cols * itemsize)
    workers, groups = constants["WORKERS"], constants["GROUPS"]
    assert launch.block == (workers + 32 * (2 + constants["COLLECTORS"]), 1, 1)
    assert workers % (32 * groups) == 0
    assert constants["COLLECTORS"] >= 1
    stages = constants["STAGES"]
    assert stages % groups == 0
    assert 1 <= groups * constants["LAG"] < stages
    words = part // word + (period > 1)
    held = stages * (operands * words * 16 + 32 + 8 * (workers // groups // 4 + 2))
    assert held + own * part * (period > 1) <= launch.shared_bytes <= target.shared_bytes
    assert launch.shared_bytes == constants["SHARED_BYTES"]
