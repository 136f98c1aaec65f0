"""What compute-sanitizer is given: benchmarks/checked_cases.py, planned without a GPU."""

import re
import sys
from pathlib import Path

import pytest

from shardops.kernels import compile, launch
from shardops.kernels.target import target_for

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(launch, "call", launch.call)  # which planning replaces
    import checked_launches

    yield checked_launches
    for name in [n for n, m in sys.modules.items() if _is_of(m, BENCHMARKS)]:
        del sys.modules[name]


def _is_of(module, folder: Path) -> bool:
    return str(getattr(module, "__file__", None)).startswith(str(folder))


def test_every_kernel_is_launched_under_the_sanitizer(checked):
    sources = compile.source_directory().glob("*.cuh")
    kernels = {name for path in sources for name in _KERNEL.findall(path.read_text())}
    assert len(kernels) > 20
    planned = checked.Planned()
    checked.run_all(planned, target_for("sm_90", checked.SM_COUNT), None)
    assert {kernel.name for kernel in planned.kernels} == kernels


def test_shares_are_all_the_cases(checked):
    """Each launch is one process's."""
    target = target_for("sm_90", checked.SM_COUNT)
    whole, *shares = (checked.Planned() for _ in range(4))
    checked.run_all(whole, target, "softmax")
    for number, share in enumerate(shares, 1):
        checked.run_all(share, target, "softmax", (number, 3))
        assert 0 < len(share.kernels) < len(whole.kernels)
    assert {k for share in shares for k in share.kernels} == set(whole.kernels)
