"""Launch plans of the norms that quantise by tiles of 128 rows."""

import itertools

import pytest

from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import (
    QuantizedNorm,
    QuantizedPlan,
    quantized_forward_plan,
)
from shardops.kernels.quantize_plan import QuantizeProblem, Scales
from shardops.kernels.target import BLOCK_RESERVE, target_for

TARGET = target_for("sm_90", 132)
LAYOUTS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}


def planned(kind, cols: int, scales: Scales, layout: str, add: bool = False) -> QuantizedPlan:
    beta = "bfloat16" if kind == "layer" else None
    norm = NormProblem(8192, cols, kind, "bfloat16", "bfloat16", beta, add)
    written = QuantizeProblem(1, 1, 8192, cols, "bfloat16", "float8_e4m3fn", scales,
                              *LAYOUTS[layout], amax=scales == "tensor")  # fmt: skip
    plan = quantized_forward_plan(QuantizedNorm(norm, written), TARGET)
    assert plan is not None
    return plan


@pytest.mark.parametrize("cols", [333, 1000, 1024, 2048, 2880, 4096, 12288])
def test_blocks_fit_a_multiprocessor(cols):
    cases = itertools.product(("rms", "layer"), ("row128", "square"), LAYOUTS, (False, True))
    for kind, scales, layout, add in cases:
        if scales == "row128" and layout == "rows":
            continue  # rows in registers, or in turn
        main = planned(kind, cols, scales, layout, add).main
        blocks = dict(main.kernel.constants)["MIN_BLOCKS"]
        shared = main.shared_bytes + BLOCK_RESERVE
        assert blocks * shared <= TARGET.shared_bytes + BLOCK_RESERVE
        assert 65536 // (blocks * main.block[0]) >= 64  # registers of a thread


@pytest.mark.parametrize("layout", ["columns", "both"])
def test_clusters_share_the_work_on_sums(layout):
    """With all sums in each block a multiprocessor would have two."""
    main = planned("rms", 4096, "row128", layout).main
    constants = dict(main.kernel.constants)
    assert (constants["SHARES"], constants["MIN_BLOCKS"]) == (1, 3)
    assert main.cluster == (16, 1, 1)


@pytest.mark.parametrize("layout", ["columns", "both"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_that_leave_blocks_idle_take_two_launches(kind, layout):
    """Of 3072 columns a cluster of 16 tiles of 256 has use for 12."""
    assert planned(kind, 2048, "row128", layout).statistics is None
    assert planned(kind, 3072, "row128", layout).statistics is not None


def test_second_launch_starts_early():
    """Unless a result has to be set to zero between the two."""
    assert planned("rms", 16384, "square", "both").main.early
    plan = planned("rms", 20480, "tensor", "columns")
    assert plan.statistics is not None
    assert not plan.main.early
