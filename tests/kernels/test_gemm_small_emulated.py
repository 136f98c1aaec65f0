"""The kernel of small products on the host, from the source that NVRTC compiles."""

import numpy as np
import pytest

from shardops.kernels.gemm_small import small_plan
from tests.closeness import assert_close
from tests.kernels import emulator
from tests.kernels.flat_products import DTYPES, TURNS, draw

pytestmark = pytest.mark.skipif(
    emulator.reason_missing is not None, reason=str(emulator.reason_missing)
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


# Tiles that are cut, down, across and along k; whole ones; one of the longest contraction.
SIZES = ((40, 72, 200), (64, 32, 128), (72, 40, 24), (8, 8, 256))


@pytest.mark.parametrize("case", range(4))
def test_small_products(case, built):
    x = tuple(DTYPES)[case % 2]
    for turns in TURNS[case // 2 :: 2]:
        drawn = draw(np.random.default_rng(case), *SIZES[case], x, *turns)
        out = np.full(drawn.want.shape, np.nan, DTYPES[x])
        launch = small_plan(drawn.problem)
        emulator.run(launch, built, [drawn.lhs, drawn.rhs], [out], [drawn.problem.shape])
        assert_close(out, drawn.want, reduced=drawn.problem.k)
