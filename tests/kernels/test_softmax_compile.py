"""Every softmax kernel compiles through NVRTC for every architecture: no GPU, no CUDA headers."""

import itertools
import re

import pytest

from shardops import errors
from shardops.kernels import compile
from shardops.kernels.softmax_plan import SoftmaxProblem, backward_plan, forward_plan
from shardops.kernels.target import target_for
from tests.kernels.norm_problems import NAMES

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

SM_COUNTS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
# Tiles, part of a warp, one warp, odd rows, blocks, shared memory, clusters or else two passes.
LENGTHS = (24, 33, 512, 1000, 1024, 3000, 3001, 8192, 12288, 20480, 32768, 65536, 65537, 262144)
LENGTHS += (2**21,)
OPTIONS = (
    {},
    {"causal": True},
    {"mask": 1, "digits": 2, "sign": -1},
    {"mask": 1, "digits": 3, "causal": True, "first": True},
    {"mask": 2, "digits": 1, "sign": 0},
)
# ptxas may put a predicate or two aside; a thread that spills more waits for its own memory.
SPILL_BYTES = 16


def problems() -> list[SoftmaxProblem]:
    """Every type at each length; options take turns over them."""
    found = []
    for turn, (keys, x) in enumerate(itertools.product(LENGTHS, NAMES)):
        options = OPTIONS[turn % len(OPTIONS)]
        found.append(SoftmaxProblem(max(64, 2**26 // keys), keys, x, **options))
    return found


@pytest.mark.parametrize("arch_index, arch", list(enumerate(SM_COUNTS)))
def test_softmax_kernels_compile_without_spilling(arch_index, arch):
    """A third of the problems an architecture, each kernel family on all of them."""
    target = target_for(arch, SM_COUNTS[arch])
    names, compiled = set(), 0
    for problem in problems()[arch_index::2]:
        for plan in (forward_plan(problem, target), backward_plan(problem, target)):
            for launch in plan.launches:
                kernel = launch.kernel
                text = compile.source_text(kernel.file, kernel.constants)
                assert "#include" not in text
                code, report = compile.compile_text(text, kernel.name, arch, report=True)
                assert code[:4] == b"\x7fELF"
                spilled = re.search(r"(\d+) bytes spill stores", report)
                assert spilled, f"no resource usage in ptxas's report:\n{report}"
                assert int(spilled[1]) <= SPILL_BYTES, f"{problem}: {report}"
                names.add(kernel.name)
                compiled += 1
    print(f"{compiled} kernels for {arch}")
    # Without clusters nothing streams, and no row is shared by all blocks.
    assert len(names) == (6 if arch == "sm_80" else 9)
