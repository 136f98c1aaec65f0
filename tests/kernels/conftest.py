"""`core`: the extension for XLA:CPU, in place of the one for CUDA."""

from types import ModuleType

import pytest

from shardops.kernels import gemm, library
from tests.kernels import host


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if reason := host.missing():
        pytest.skip(reason)
    extension = host.extension()
    monkeypatch.setattr(library, "core", lambda: extension)
    monkeypatch.setattr(gemm, "_query_device", lambda: 0)
    return extension
