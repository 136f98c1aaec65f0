"""Every norm kernel compiles through NVRTC for every architecture: no GPU, no CUDA headers."""

import re

import pytest

from shardops import errors
from shardops.kernels import compile
from shardops.kernels.norm_plan import NormProblem, backward_plan, forward_plan
from shardops.kernels.target import target_for
from tests.kernels.norm_problems import NAMES

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

SM_COUNTS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
# Sub-warp rows, several warps, a whole block, twice-read with sums in shared memory, and in global.
LENGTHS = (7, 96, 1000, 4096, 12288, 65536)
# A thread that spills more than this waits for its own memory more than for the row.
SPILL_BYTES = 256


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


@pytest.mark.parametrize("arch_index, arch", list(enumerate(SM_COUNTS)))
def test_norm_kernels_compile_without_spilling(arch_index, arch):
    """A third of the problems an architecture, each kernel family and type on all of them."""
    target = target_for(arch, SM_COUNTS[arch])
    compiled = 0
    for problem in problems()[arch_index::3]:
        plan = backward_plan(problem, target)
        for launch in (forward_plan(problem, target), plan.main):
            kernel = launch.kernel
            text = compile.source_text(kernel.file, kernel.constants)
            code, report = compile.compile_text(text, kernel.name, arch, report=True)
            assert code[:4] == b"\x7fELF"
            spilled = re.search(r"(\d+) bytes spill stores", report)
            assert spilled, f"no resource usage in ptxas's report:\n{report}"
            assert int(spilled[1]) <= SPILL_BYTES, f"{problem}: {report}"
            compiled += 1
    print(f"{compiled} kernels for {arch}")
    assert compiled == 2 * len(problems()) // 3


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
            forward_plan(problem, target_for("sm_90", 132)),
            backward_plan(problem, target_for("sm_90", 132)).main,
        )
    ]
    for kernel in kernels:
        assert "#include" not in compile.source_text(kernel.file, kernel.constants)
