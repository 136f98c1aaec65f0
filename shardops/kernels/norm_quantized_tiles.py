"""Launches of the norms that quantise tile by tile: columns, or both layouts, from one read of x.

A cluster of blocks has all columns of a few rows in shared memory, each block a tile of them, until
their statistics are known. Where that is too much, blocks of the cluster have nothing to do, or a
GPU has no clusters, statistics are found by a launch before, and x is read again.
"""

import itertools
from dataclasses import dataclass, replace

from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem, constants_of
from shardops.kernels.norm_staged import has_staged_kernels
from shardops.kernels.quantize_plan import (
    QuantizeProblem,
    Tiling,
    written_arrays,
    written_constants,
)
from shardops.kernels.sizes import round_up
from shardops.kernels.target import BLOCK_RESERVE, Target

_CLUSTERS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Tiles:
    """How blocks lie over rows.

    Args:
      cluster: blocks that have all columns of their rows; 0: statistics are given.
      min_blocks: blocks resident on a multiprocessor.
      once: y stays in registers from the scales of its blocks to the data.
      lines: columns leave by way of shared memory.
      shares: each block of a cluster merges the sums of a share of the rows, not of all.
    """

    tile: Tiling
    cluster: int
    min_blocks: int
    once: bool = False
    lines: bool = False
    shares: bool = False


def tiles_in_clusters(norm: NormProblem, written: QuantizeProblem, target: Target) -> Tiles | None:
    """One launch; None where a cluster does not hold the rows of a tile, or is slower than two.

    Rows as few as blocks of scales and sectors of columns allow, and clusters as small as can be:
    blocks side by side then wait for each other least.
    """
    turned, layer = written.as_columns, norm.kind == "layer"
    wide = 64 if turned else 128
    tall = written.scales == "square" or (turned and written.scales == "row128")
    down = (4 if turned else 8) if tall else 1
    # y is made once where that saves more than registers cost.
    once = not tall and (
        (layer and written.scales == "row128") or (written.scales == "row32" and (layer or turned))
    )
    both = turned and written.as_rows
    # Parts across at most, and turns: first those that leave a multiprocessor more blocks. As
    # measured, docs/measured.md.
    squares = written.scales == "square" and not norm.add
    if tall and turned:
        sizes = ((2, 2), (4, 2)) if not layer or (both and squares) else ((2, 2),)
    elif tall:
        sizes = ((1, 2), (2, 2)) if not layer or squares else ((1, 2),)
    elif both and written.scales == "tensor" and norm.cols <= 1024 and norm.cols % 256 == 0:
        sizes = ((4, 1),)
    else:
        sizes = ((8, 2 if turned or once else 1), (16, 2))
    most_blocks = target.cluster_blocks if has_staged_kernels(target) else 1
    clusters = [blocks for blocks in _CLUSTERS if blocks <= most_blocks]
    for (most, turns), cluster in itertools.product(sizes, clusters):
        across = -(-norm.cols // (wide * cluster))
        across = round_up(across, 2 if turned else max(1, turns // down))
        if across <= most:
            tile = Tiling(down, across, turned, turns)
            found = blocks_of(norm, written, tile, cluster, target, once)
            least = _least_part(norm, found, written.as_rows) if tall and cluster > 1 else 0.0
            enough = norm.cols >= least * cluster * tile.cols
            return found if found.min_blocks and enough else None
    return None


def _least_part(norm: NormProblem, shape: Tiles, as_rows: bool) -> float:
    """Of a cluster's columns that rows have to have: its other blocks are idle.

    As measured (docs/measured.md, "Norms that quantise"); two launches of LayerNorm are nearly as
    fast as one at any size of cluster.
    """
    if norm.kind == "layer" and not norm.add and norm.cols % 8 == 0:
        return 0.9
    if shape.cluster <= 8 or norm.cols % 8:
        return 0.0
    if not shape.tile.turned:
        return 0.6
    return 0.8 if as_rows or shape.tile.across == 2 else 0.9


def tiles_after_statistics(norm: NormProblem, written: QuantizeProblem, target: Target) -> Tiles:
    """A launch that is given the statistics, of rows of any length."""
    tile = Tiling(4, 2, True) if written.as_columns else Tiling(8, 1, False)
    return blocks_of(norm, written, tile, 0, target, lines=written.as_columns)


def blocks_of(
    norm: NormProblem,
    written: QuantizeProblem,
    tile: Tiling,
    cluster: int,
    target: Target,
    once: bool = False,
    lines: bool = False,
) -> Tiles:
    """As many blocks a multiprocessor as registers and shared memory allow.

    All sums of a tall tile would take the shared memory of one block more. Tiles of 256 columns
    with a residual are no faster for it.
    """
    shares = cluster > 1 and tile.rows >= 128 and not (norm.add and tile.turned and tile.across > 2)
    shape = Tiles(tile, cluster, 1, once, lines, shares)
    room = target.shared_bytes + BLOCK_RESERVE
    shared = _shared_bytes(norm, written, shape) + BLOCK_RESERVE
    blocks = min(65536 // _registers(norm, written, shape, target) // tile.threads, room // shared)
    return replace(shape, min_blocks=blocks)


def _registers(norm: NormProblem, written: QuantizeProblem, shape: Tiles, target: Target) -> int:
    """The most that a thread takes."""
    if target.arch in ("sm_80", "sm_86", "sm_87"):  # which convert to 8 bits by hand
        return 160 if written.block > 1 else 128
    if target.arch not in ("sm_89", "sm_90") and shape.shares:  # whose ptxas takes more
        return 112
    # Both layouts of blocks of 128 would do with few too, and were slower.
    few = written.scales == "square" or (written.scales == "row128" and not written.as_rows)
    if few and shape.cluster == 0 and norm.kind == "rms" and shape.tile.turned:
        return 64
    return 128 if shape.once else 80


def tiles_launch(norm: NormProblem, written: QuantizeProblem, shape: Tiles) -> Launch:
    """Plans the launch for a problem whose groups are joined."""
    tile = shape.tile
    chunks = shape.cluster or -(-norm.cols // tile.cols)
    shared = _shared_bytes(norm, written, shape)
    constants = (
        *(constant for constant in constants_of(norm, 8) if constant[0] != "VECTOR"),
        *written_constants(written),
        *tile.constants,
        ("LINES", int(shape.lines)),
        ("CLUSTER", max(1, shape.cluster)),
        ("SHARES", int(shape.shares)),
        ("GIVEN", int(shape.cluster == 0)),
        ("ONCE", int(shape.once)),
        ("SHARED_BYTES", shared),
        ("MIN_BLOCKS", shape.min_blocks),
    )
    return Launch(
        Kernel("norm_quantized_tiles.cuh", "norm_quantized_tiles", constants),
        (written.slabs(tile) * chunks, 1, 1),
        (tile.threads, 1, 1),
        cluster=(max(1, shape.cluster), 1, 1),
        shared_bytes=shared,
        zeroed=(written_arrays(written),) * written.amax,
    )


def _shared_bytes(norm: NormProblem, written: QuantizeProblem, shape: Tiles) -> int:
    """Of `Buffers` in csrc/kernels/norm_quantized_tiles.cuh."""
    tile, cluster = shape.tile, max(1, shape.cluster)
    parameters = [TYPE_BYTES[of] for of in (norm.gamma, norm.beta) if of is not None]
    kept = tile.cols * (tile.rows * TYPE_BYTES[norm.x] + sum(parameters))
    merged = tile.rows // cluster if shape.shares else tile.rows
    statistics = 8 * (tile.rows * (tile.across + 1) + merged * cluster)
    barrier = 16
    blocks = written.scales in ("row128", "row32")
    row_blocks = tile.cols // written.block if written.as_rows and blocks else 1
    column_blocks = tile.rows // written.block if written.as_columns and blocks else 1
    squares = tile.cols // 128 if written.scales == "square" else 1
    scales = (
        4 * row_blocks * (tile.rows if written.as_rows and blocks else 4),
        4 * column_blocks * (tile.cols if written.as_columns and blocks else 4),
        4 * squares,
        tile.rows * tile.cols if shape.lines else 16,
    )
    return kept + round_up(statistics, 16) + barrier + sum(round_up(part, 16) for part in scales)
