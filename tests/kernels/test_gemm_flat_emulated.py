"""The kernel of flat products on the host, from the source that NVRTC compiles."""

import numpy as np
import pytest

from shardops.kernels.gemm_flat import flat_plan
from shardops.kernels.target import target_for
from tests.closeness import assert_close
from tests.kernels import emulator
from tests.kernels.flat_products import DTYPES, TURNS, draw

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)
TARGET = target_for("sm_90", 2)  # so few that blocks make several tiles


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


# Tiles that are cut, down, across and along k; blocks with more tiles than places, and with several
# strips.
SIZES = ((200, 264, 40), (72, 1288, 64), (400, 520, 16), (264, 392, 24))


@pytest.mark.parametrize("case", range(4))
def test_flat_products(case, built):
    x = tuple(DTYPES)[case % 2]
    drawn = draw(np.random.default_rng(case), *SIZES[case], x, *TURNS[case])
    out = np.full(drawn.want.shape, np.nan, DTYPES[x])
    launch = flat_plan(drawn.problem, TARGET)
    emulator.run(launch, built, [drawn.lhs, drawn.rhs], [out], [drawn.problem.shape])
    assert_close(out, drawn.want, reduced=drawn.problem.k)
