"""The kernel caches: memory, pack, disk, NVRTC; many processes; damaged, unwritable directories."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import warnings

import pytest

from shardops import config, errors
from shardops.kernels import compile
from shardops.kernels.cache import KernelDirectory
from shardops.kernels.norm_plan import NormProblem, backward_plan
from shardops.kernels.target import target_for

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

KERNEL = backward_plan(
    NormProblem(8, 64, "rms", "float32", "float32"), target_for("sm_90", 132)
).finish.kernel

# Compiles the kernel and says where it came from. Run with -W error: a warning fails it.
SCRIPT = f"""
import json
from shardops.kernels import compile
code = compile.cubin({KERNEL.file!r}, {KERNEL.name!r}, {KERNEL.constants!r}, "sm_90")
print(json.dumps([vars(compile.counts), len(code)]))
"""


def cubin(arch: str = "sm_90") -> bytes:
    return compile.cubin(KERNEL.file, KERNEL.name, KERNEL.constants, arch)


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Sets the configuration, with empty caches; returns a function that changes it."""

    def change(**fields):
        changed = dataclasses.replace(config.get(), **fields)
        monkeypatch.setattr(config, "get", lambda: changed)
        compile.clear_memory()

    monkeypatch.setattr(compile, "counts", compile.Counts())
    change(cache_dir=tmp_path / "cache", kernel_pack=None, nvrtc=True)
    yield change
    compile.clear_memory()


def entries(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted((directory / "kernels").iterdir())


def start(cache: pathlib.Path, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "SHARDOPS_CACHE_DIR": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[dict[str, int], int]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    counts, length = json.loads(out)
    return counts, length


def test_second_use_comes_from_memory_then_disk(settings, tmp_path):
    first = cubin()
    assert cubin() == first
    assert compile.counts == compile.Counts(compiled=1, memory=1)
    compile.clear_memory()
    assert cubin() == first
    assert compile.counts == compile.Counts(compiled=1, memory=1, disk=1)
    assert len(entries(tmp_path / "cache")) == 1


def test_architecture_and_constants_are_in_the_key(settings, tmp_path):
    assert cubin("sm_90") != cubin("sm_80")
    wider = tuple((name, 128 if name == "COLS" else value) for name, value in KERNEL.constants)
    compile.cubin(KERNEL.file, KERNEL.name, wider, "sm_90")
    assert compile.counts == compile.Counts(compiled=3)
    assert len(entries(tmp_path / "cache")) == 3


def test_nvrtc_version_is_in_the_disk_key(settings, monkeypatch):
    cubin()
    compile.clear_memory()
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "99.0")
    cubin()
    assert compile.counts == compile.Counts(compiled=2)


def test_eight_cold_processes_share_a_directory(tmp_path):
    processes = [start(tmp_path) for _ in range(8)]
    lengths = {outcome(process)[1] for process in processes}
    assert len(lengths) == 1
    # No temporary file is left, and the entry is whole: the next process compiles nothing.
    assert [path.suffix for path in entries(tmp_path)] == [".kernel"]
    counts, length = outcome(start(tmp_path))
    assert (counts["disk"], counts["compiled"], {length}) == (1, 0, lengths)


@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty", "flipped"])
def test_damaged_entry_is_replaced_with_one_warning(settings, tmp_path, damage):
    first = cubin()
    (entry,) = entries(tmp_path / "cache")
    whole = entry.read_bytes()
    entry.write_bytes(
        {
            "truncated": whole[:-100],
            "foreign": b"\x7fELF of something else" * 100,
            "empty": b"",
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        }[damage]
    )
    compile.clear_memory()
    with pytest.warns(RuntimeWarning, match=f"damaged or foreign file, {entry.name}"):
        assert cubin() == first
    assert compile.counts == compile.Counts(compiled=2)
    assert entry.read_bytes() == whole


def test_unwritable_directory_warns_once_and_works_from_memory(settings, tmp_path):
    # A file where the directory should be: nobody can write there, not even root.
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    settings(cache_dir=blocked)
    with pytest.warns(RuntimeWarning, match=r"cannot be .*SHARDOPS_CACHE_DIR"):
        first = cubin("sm_90")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubin("sm_80")
        assert cubin("sm_90") == first
    assert compile.counts == compile.Counts(compiled=2, memory=1)


def test_pack_serves_without_nvrtc(settings, tmp_path):
    code = cubin()
    pack_key = compile._digest(compile.source_text(KERNEL.file, KERNEL.constants), "sm_90")
    KernelDirectory(tmp_path / "pack").write(pack_key, code)
    settings(kernel_pack=tmp_path / "pack", nvrtc=False)
    assert cubin() == code
    assert compile.counts == compile.Counts(compiled=1, pack=1)


def test_missing_kernel_is_named_where_nvrtc_is_forbidden(settings, tmp_path):
    settings(kernel_pack=tmp_path, nvrtc=False)
    with pytest.raises(
        errors.KernelUnavailableError, match=r"norm_finish for sm_90.*SHARDOPS_NVRTC"
    ):
        cubin()


def test_missing_cuda_core_is_named_with_its_fix(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(errors.KernelUnavailableError, match=r"cuda-core.*extra cuda13"):
        cubin()


def test_compile_error_names_kernel_and_architecture(settings):
    with pytest.raises(errors.KernelUnavailableError, match=r"broken for sm_90"):
        compile.compile_text("this is no C++", "broken", "sm_90")
    with pytest.raises(errors.KernelUnavailableError, match="Upgrade nvidia-cuda-nvrtc"):
        compile.compile_text('extern "C" __global__ void f() {}', "f", "sm_999")
