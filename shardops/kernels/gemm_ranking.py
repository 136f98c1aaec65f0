"""Which of the algorithms that cuBLASLt names to take without timing them.

Its heuristic knows how long they take to some percent only. The waves of tiles over the
multiprocessors, which it tells too, say more: the last wave costs as much as a full one. What an
H200 took for products of one tile is, apart from that, within a few percent the same relative to
tiles of 256 x 128: `_TILES`. Small tiles gain where k is short, as one is stored while the next is
multiplied.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST = 8  # candidates: the heuristic names no more

# cublasLtMatmulAlgoConfigAttributes_t: the kernel of sm_90 with tensor memory accelerator and warp
# groups. Of others nothing was measured: they stay as the heuristic has them.
_KERNEL = 66
_BYTES = {2: 2, 14: 2, 28: 1, 29: 1}  # cudaDataType: of what was measured
_LEAST_GAIN = 0.015  # expected, to leave the first for another
_LEAST_TIME = 0.9  # of a tile, relative: what was seen at k = 64, the shortest measured


class _Tile(NamedTuple):
    """Relative time where k is long, and by how much less it is, times the bytes of k."""

    time: float
    short: float = 0.0


# By cublasLtMatmulTile_t, as measured: docs/measured.md.
_TILES = {
    20: _Tile(1.04, 130),  # 128 x 128
    23: _Tile(1.0),  # 128 x 256
    24: _Tile(1.0),  # 256 x 128
    29: _Tile(1.01, 130),  # 128 x 160
    31: _Tile(1.04),  # 192 x 128
    32: _Tile(1.055),  # 128 x 192
    184: _Tile(1.015, 130),
    197: _Tile(1.015, 130),
    201: _Tile(1.015, 130),
    209: _Tile(1.03),
    248: _Tile(1.025),
    495: _Tile(1.04),
}

Candidate = Mapping[str, Any]


def preferred(candidates: Sequence[Candidate], attributes: Mapping[str, int]) -> Candidate:
    """The candidate that is expected to be the fastest: the first, unless another one clearly is.

    A pure function, so that all processes of a run take the same.

    Args:
      candidates: of `gemm_query`, in its order; at least one.
      attributes: of the GEMM, as csrc/gemm_problem.h names them.
    """
    first, *_ = candidates
    if not _measured(attributes):
        return first
    along = attributes["k"] * _BYTES[attributes["type"]]
    expected = [_time(candidate, along) for candidate in candidates]
    least = min(expected)
    if not least < expected[0] * (1 - _LEAST_GAIN) or math.isinf(expected[0]):
        return first
    return candidates[expected.index(least)]


def _measured(attributes: Mapping[str, int]) -> bool:
    scales = attributes.get("scale_a", 0), attributes.get("scale_b", 0)
    known = attributes["type"] in _BYTES and attributes["out_type"] in (2, 14)
    return known and max(scales) <= 1 and not attributes.get("sm_count")


def _time(candidate: Candidate, along: int) -> float:
    """Relative; infinite of what was not measured, and of less than a wave."""
    tile, waves = _TILES.get(candidate["tile"]), candidate["waves"]
    if tile is None or candidate["kernel"] != _KERNEL or candidate["split"] > 1 or waves <= 1:
        return math.inf
    return max(tile.time - tile.short / along, _LEAST_TIME) * math.ceil(waves - 1e-3) / waves
