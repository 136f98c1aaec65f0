"""Launch shapes of the norms that quantise, for timing."""

import itertools
from collections.abc import Iterator

from shardops.kernels.norm_quantized_plan import QuantizedNorm, RowGeometry
from shardops.kernels.norm_quantized_rows import Rows, rows_of
from shardops.kernels.norm_quantized_tiles import Tiles, blocks_of
from shardops.kernels.quantize_plan import Tiling
from shardops.kernels.target import Target


def shapes(problem: QuantizedNorm, target: Target) -> Iterator[RowGeometry | Rows | Tiles | None]:
    """Launch shapes worth timing; None is the plan's."""
    norm, written = problem.norm, problem.written
    assert written is not None
    yield None
    if not written.as_columns:
        for per_thread, resident in itertools.product((3, 4, 6, 7, 8), (512, 640, 768, 1024)):
            threads = -(-norm.vectors // (32 * per_thread)) * 32
            rows = max(1, 128 // threads)
            registers = per_thread * norm.registers(norm.x) + 32
            if threads * rows <= resident and registers * resident <= 65536 and threads <= 1024:
                yield RowGeometry(threads, rows, resident // (threads * rows))
        for threads, cluster, open in itertools.product(
            (8, 16, 32, 64, 128, 256, 512), (1, 2, 8), (True, False)
        ):
            found = rows_of(norm, written, target, threads, cluster, open)
            if found is not None and found.per_thread(norm) in range(2, 9):
                yield found
    down = {"square": 4, "row128": 4 if written.as_columns else 1}.get(written.scales, 1)
    down *= 1 + (written.scales == "square" and not written.as_columns)
    for across, turns, cluster in itertools.product((2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8, 16)):
        tile = Tiling(down, across, written.as_columns, turns)
        if down * across % turns == 0 and 4 <= tile.warps <= 16 and tile.rows <= tile.threads:
            found = blocks_of(norm, written, tile, cluster, target)
            if (cluster - 1) * tile.cols < norm.cols <= cluster * tile.cols and found.min_blocks:
                yield found


def words_of(shape: RowGeometry | Rows | Tiles | None) -> str:
    if isinstance(shape, Tiles):
        tile = shape.tile
        return (
            f"{tile.down}x{tile.across} parts, {tile.turns} turns, cluster {shape.cluster}, "
            f"{shape.min_blocks} blocks{', once' * shape.once}{', lines' * shape.lines}"
        )
    if isinstance(shape, Rows):
        return (
            f"{shape.threads_per_row} threads, {shape.rows_per_block} rows, cluster "
            f"{shape.cluster}, {shape.stages} stages, {shape.min_blocks} blocks"
            f"{', open' * shape.open}"
        )
    if isinstance(shape, RowGeometry):
        return (
            f"{shape.threads_per_row} threads, {shape.rows_per_block} rows, "
            f"{shape.min_blocks} blocks"
        )
    return ""
