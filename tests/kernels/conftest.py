"""`core`: the extension for XLA:CPU, for CUDA's. `caches`: empty caches of kernels of a test.
`kernels`: the command line. `nvrtc`: for tests that compile."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shardops import __main__ as command_line
from shardops import config, errors
from shardops.kernels import compile, gemm, library
from tests.kernels import host


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if reason := host.missing():
        pytest.skip(reason)
    extension = host.extension()
    monkeypatch.setattr(library, "core", lambda: extension)
    monkeypatch.setattr(gemm, "_query_device", lambda: 0)
    return extension


@pytest.fixture(scope="session")
def nvrtc() -> None:
    try:
        compile.nvrtc_version()
    except errors.KernelUnavailableError as error:
        pytest.skip(f"{error}")


@pytest.fixture
def extension_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering writes the custom call; only running it needs the extension."""
    monkeypatch.setattr(library, "core", lambda: None)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Empty caches in memory and under `tmp_path`; the fixture changes the configuration."""

    def change(**fields: object) -> None:
        changed = dataclasses.replace(config.get(), **fields)
        monkeypatch.setattr(config, "get", lambda: changed)
        compile.clear_memory()

    monkeypatch.setattr(compile, "counts", compile.Counts())
    change(cache_dir=tmp_path / "cache", kernel_pack=None, nvrtc=True)
    yield change
    compile.clear_memory()


@pytest.fixture
def kernels(
    capsys: pytest.CaptureFixture[str], caches: Callable[..., None]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `python -m shardops kernels ...`: its exit status, and both its outputs."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = command_line.main(["kernels", *map(str, arguments)])
        except SystemExit as exited:
            status = int(exited.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run
