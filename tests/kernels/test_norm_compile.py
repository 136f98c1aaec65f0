"""Norm kernels through NVRTC: no GPU, no CUDA headers. What they take: test_resources.py."""

import pytest

from shardops import errors
from shardops.kernels import compile
from shardops.kernels.norm_plan import backward_plan, forward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.target import target_for
from tests.kernels.norm_problems import NAMES

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

SM_COUNTS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
# Sub-warp rows, several warps, a whole block, twice-read with sums in shared memory, and in global.
LENGTHS = (7, 96, 1000, 4096, 12288, 65536)


def problems() -> list[NormProblem]:
    """All types of x and gamma at each length; options and architectures take turns over them."""
    found = []
    for length_index, cols in enumerate(LENGTHS):
        for x_index, x in enumerate(NAMES):
            for gamma_index, gamma in enumerate(NAMES):
                turn = length_index + x_index + 2 * gamma_index
                found.append(
                    NormProblem(
                        rows=10_000,
                        cols=cols,
                        kind=("layer", "rms")[turn % 2],
                        x=x,
                        gamma=gamma,
                        beta=(None, *NAMES)[turn // 2 % 4] if turn % 2 == 0 else None,
                        add=turn % 3 == 0,
                        zero_centered=turn % 5 == 0,
                    )
                )
    return found


def test_finish_kernel_compiles_for_every_architecture():
    problem = NormProblem(100, 4096, "layer", "bfloat16", "bfloat16", "bfloat16")
    for arch, sm_count in SM_COUNTS.items():
        kernel = backward_plan(problem, target_for(arch, sm_count)).finish.kernel
        text = compile.source_text(kernel.file, kernel.constants)
        assert compile.compile_text(text, kernel.name, arch)[0][:4] == b"\x7fELF"


def test_sources_include_nothing_of_the_toolkit():
    kernels = [
        launch.kernel
        for problem in problems()
        for launch in (
            forward_plan(problem, target_for("sm_90", 132)).main,
            backward_plan(problem, target_for("sm_90", 132)).main,
        )
    ]
    for kernel in kernels:
        assert "#include" not in compile.source_text(kernel.file, kernel.constants)
