"""Kernel packs have what plans take that count rows and multiprocessors."""

import itertools
import os

import pytest

from shardops.kernels import packing
from shardops.kernels.families import FAMILIES, PASSES, Request
from shardops.kernels.sizes import BLOCKS_OF_A_ROW
from shardops.kernels.target import target_for

MANY_ROWS, MANY_SM_COUNTS = range(1, 401), range(1, 193)
DRAWN_ROWS = len(MANY_ROWS) if os.environ.get("SHARDOPS_EXHAUSTIVE") == "1" else 2
MXFP8 = (("scaling", "mxfp8"), ("layout", "both"))
# Whose plans count rows, multiprocessors, or both.
COUNTING = [
    Request("softmax", 2**18 + 1, "float32"),
    Request("softmax", 2**19, "bfloat16", options=(("mask", "rows"),)),
    Request("layer_norm", 12288, "bfloat16"),
    Request("rms_norm", 2**17, "bfloat16", options=(("gamma_dtype", "float16"),)),
    Request("layer_norm", 2**18 + 1, "bfloat16", options=(("add", "yes"),)),
    Request("rms_norm_quantized", 2**19, "bfloat16", ("forward",), MXFP8),
    Request("layer_norm_quantized", 2**16, "float16", ("forward",), (("scaling", "current"),)),
    Request("quantize", 2**19, "bfloat16", ("forward",), MXFP8),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_packs_have_what_few_rows_take_on_a_gpu_of_any_size(arch, rng):
    for request in COUNTING:
        packed = set(packing.kernels_of(request, arch))
        launches = FAMILIES[request.op].launches
        for sm_count in MANY_SM_COUNTS:
            target = target_for(arch, sm_count)
            for count in (1, *rng.choice(MANY_ROWS, DRAWN_ROWS, replace=False).tolist()):
                planned = {launch.kernel for launch in launches(request, count, target)}
                assert planned <= packed, (request, count, sm_count)


@pytest.mark.parametrize("most", [20, 31, 64, 100])
def test_packs_have_every_number_of_blocks_of_a_row_of_softmax(most):
    """Numbers come of rows and multiprocessors alone, but for the most that a row's length has."""
    for arch in ("sm_80", "sm_86", "sm_89"):
        kernels = packing.kernels_of(Request("softmax", most * 8192, "float32"), arch)
        stages = {(k.name, dict(k.constants)["PARTS"], dict(k.constants)["STAGE"]) for k in kernels}
        names = [f"softmax_{direction}_long" for direction in PASSES]
        several = [n for n in BLOCKS_OF_A_ROW if 1 < n <= most]
        two = itertools.product(names, several, [1, 2])
        assert stages == {*two, *itertools.product(names, [1], [0])}
