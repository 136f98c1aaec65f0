"""Quantising kernels through NVRTC: no GPU, no CUDA headers, and nothing kept in local memory."""

import itertools

import pytest

from shardops import errors
from shardops.kernels import compile, packing
from shardops.kernels.families import FAMILIES, OPTIONS, Request
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import QuantizedNorm, quantized_forward_plan
from shardops.kernels.quantize_plan import QuantizeProblem
from shardops.kernels.target import target_for
from tests.kernels.norm_problems import NAMES
from tests.kernels.quantize_problems import LAYOUTS as LAYOUT_NAMES
from tests.kernels.quantize_problems import MODES

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

ARCHES = ("sm_90", "sm_80", "sm_100")
LENGTHS = (1024, 2048, 2880, 4096, 8192, 12288, 16384)
LAYOUTS = ("rows", "columns", "both")
CHOICES = list(itertools.product(*(OPTIONS[name].values for name in FAMILIES["quantize"].options)))


def spilled(kernel, arch) -> int:
    _, about = compile.compile_kernel(kernel.file, kernel.name, kernel.constants, arch)
    return about["resources"]["stack_bytes"]


@pytest.mark.parametrize("arch", ARCHES)
def test_quantising_kernels_do_not_spill(arch):
    """Types take turns over scales, formats and layouts."""
    found = []
    for turn, chosen in enumerate(CHOICES[ARCHES.index(arch) :: 2]):
        options = tuple(zip(FAMILIES["quantize"].options, chosen, strict=True))
        request = Request("quantize", 4096 + turn % 2, NAMES[turn % 3], options=options)
        for kernel in packing.kernels_of(request, arch, 8192, 132):
            if stack := spilled(kernel, arch):
                found.append((request, kernel.name, stack))
    assert not found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_that_quantise_do_not_spill(kind, layout):
    """At the lengths of the goal: of bfloat16, GPUs, scales and residuals in turns."""
    scales = tuple(MODES)
    found = []
    for turn, length in enumerate(LENGTHS, len(layout)):
        add, arch = turn % 2 == 1, ARCHES[turn % 4 % 3]
        beta = "bfloat16" if kind == "layer" else None
        norm = NormProblem(8192, length, kind, "bfloat16", "bfloat16", beta, add)
        covers = scales[turn % 4]
        ways = next(of for of, name in LAYOUT_NAMES.items() if name == layout)
        written = QuantizeProblem(
            1, 1, 8192, length, "bfloat16", "float8_e4m3fn", covers, *ways, covers == "tensor"
        )
        plan = quantized_forward_plan(QuantizedNorm(norm, written), target_for(arch, 132))
        assert plan is not None
        for launch in plan.launches:
            if stack := spilled(launch.kernel, arch):
                found.append((norm, covers, arch, launch.kernel.name, stack))
    assert not found
