"""The kernel that orders MXFP8 scales, on the host, from the source that NVRTC compiles."""

import os

import numpy as np
import pytest

from shardops.kernels.gemm_scaled_plan import Matrix
from shardops.kernels.scale_tiles import Scales, shape_of, tiles_plan
from tests.kernels import emulator
from tests.kernels.scale_order import in_tiles, operands

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)
DRAWN = 400 if os.environ.get("SHARDOPS_EXHAUSTIVE") == "1" else 20


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


def check(pair: list[tuple[Matrix, np.ndarray]], built) -> None:
    sides = [Scales.of(codes.shape, matrix) for matrix, codes in pair]
    launch, scalars = tiles_plan(*sides)
    tiles = [np.full(shape_of(*side.counts), 0xAB, np.uint8) for side in sides]
    emulator.run(launch, built, [codes for _, codes in pair], tiles, scalars)
    for found, (matrix, codes) in zip(tiles, pair, strict=True):
        np.testing.assert_array_equal(found, in_tiles(matrix, codes), err_msg=str(matrix))


def test_scales_of_both_operands_come_into_cublaslts_order(built, rng, capfd):
    for pair in operands(rng, DRAWN):
        check(pair, built)
    assert "misaligned" not in capfd.readouterr().err


def test_scales_that_begin_anywhere(built, rng, capfd):
    """As those of slices do."""
    (lhs, codes), rhs = next(operands(rng))
    for start in (1, 2, 4, 8):
        room = np.empty(codes.size + 32, np.uint8)
        first = -room.ctypes.data % 16 + start
        shifted = room[first : first + codes.size].reshape(codes.shape)
        shifted[:] = codes
        check([(lhs, shifted), rhs], built)
    assert "misaligned" not in capfd.readouterr().err
