"""Finding CUDA's libraries, and registering the extension."""

import ctypes
import dataclasses
import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from shardops.errors import KernelUnavailableError
from shardops.kernels import library
from tests.kernels import host

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def make_library(path: Path, *symbols: str) -> Path:
    """A shared library with these functions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    code = "".join(f'extern "C" int {symbol}() {{ return 0; }}\n' for symbol in symbols)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=code, text=True, check=True)
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which a library called "probe" can be put anywhere, and is nowhere yet."""
    # What one test loads stays loaded, and is found there by the next: each has its own names.
    new, old = (f"lib{tmp_path.name}.so.{version}" for version in (13, 12))
    probe = library.Library(
        (new, old),
        ("cu13/lib", "probe/lib"),
        ("probe_new", "probe_old"),
        "Install probe.",
    )
    monkeypatch.setitem(library.LIBRARIES, "probe", probe)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return tmp_path


def test_find_library_names_all_it_tried(places: Path) -> None:
    with pytest.raises(KernelUnavailableError) as caught:
        library.find_library("probe")
    text = str(caught.value)
    assert "kernels: the library probe is missing; expected one of lib" in text
    assert "Install probe." in text
    for soname in library.LIBRARIES["probe"].sonames:
        assert text.count(soname) == 2, "expected, and tried"
        assert f"{soname} (cannot open shared object file" in text


@needs_compiler
def test_find_library_tries_each_place_once(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_library(places / f"cuda/lib64/lib{places.name}.so.13", "probe_old")
    monkeypatch.setenv("CUDA_PATH", str(places / "cuda"))
    with pytest.raises(KernelUnavailableError) as caught:
        library.find_library("probe")
    assert str(caught.value).count(f"{old} (") == 1


@needs_compiler
def test_find_library_prefers_wheels_to_cuda_home(places: Path) -> None:
    symbols = ("probe_new", "probe_old")
    in_home = make_library(places / f"cuda/lib64/lib{places.name}.so.12", *symbols)
    assert library.find_library("probe") == str(in_home)
    # Each of these is loaded when it is found, but under a name of another version or folder.
    in_wheel = make_library(places / f"site/nvidia/probe/lib/lib{places.name}.so.12", *symbols)
    assert library.find_library("probe") == str(in_home), "versions never mix in a process"
    assert str(in_wheel) in list(library._candidates(library.LIBRARIES["probe"]))


@needs_compiler
def test_find_library_of_its_own_prefers_wheels_to_what_is_loaded(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which compiler there is does not depend on the imports of a program."""
    assert not library.LIBRARIES["nvrtc"].shared
    own = dataclasses.replace(library.LIBRARIES["probe"], shared=False)
    monkeypatch.setitem(library.LIBRARIES, "probe", own)
    soname, symbols = own.sonames[0], ("probe_new", "probe_old")
    loaded = make_library(places / f"elsewhere/{soname}", *symbols)
    ctypes.CDLL(str(loaded))
    in_home = make_library(places / f"cuda/lib64/{soname}", *symbols)
    assert library.find_library("probe") == str(loaded)
    in_wheel = make_library(places / f"site/nvidia/cu13/lib/{soname}", *symbols)
    assert library.find_library("probe") == str(in_wheel)
    assert str(in_home) in library._candidates(own)


@needs_compiler
def test_find_library_in_a_wheel(places: Path) -> None:
    path = make_library(
        places / f"site/nvidia/cu13/lib/lib{places.name}.so.13", "probe_new", "probe_old"
    )
    assert library.find_library("probe") == str(path)


@needs_compiler
def test_find_library_passes_over_a_wrong_version(places: Path) -> None:
    old = make_library(places / f"cuda/lib64/lib{places.name}.so.13", "probe_old")
    broken = places / f"cuda/lib64/lib{places.name}.so.12"
    broken.write_text("no library")
    with pytest.raises(KernelUnavailableError) as caught:
        library.find_library("probe")
    assert f"{old} (lacks probe_new)" in str(caught.value)
    assert f"{broken} (" in str(caught.value)
    good = make_library(places / f"cuda/lib/lib{places.name}.so.12", "probe_old", "probe_new")
    assert library.find_library("probe") == str(good)


def test_core_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shardops._core", None)
    with pytest.raises(KernelUnavailableError, match=r"shardops\._core cannot be imported .*pip"):
        library.load_extension()


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is registered with JAX from now on, by platform and name, instead of registering it."""
    made: list[tuple[str, str]] = []

    def record(name: str, _: Any, platform: str) -> None:
        made.append((platform, name))

    monkeypatch.setattr(jax.ffi, "register_ffi_type", record)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", record)
    for cached in (library._core, library._register):
        cached.cache_clear()
        monkeypatch.setattr(library, cached.__name__, cached)
    return made


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if reason := host.missing():
        pytest.skip(reason)
    found = host.extension()
    monkeypatch.setattr(library, "load_extension", lambda: found)
    return found


ALL = [
    ("CUDA", "shardops.Kernel"),
    ("CUDA", "shardops.GemmPlan"),
    ("CUDA", "shardops_launch"),
    ("CUDA", "shardops_gemm"),
]


def test_core_registers_once_from_many_threads(
    extension: ModuleType, registrations: list[tuple[str, str]]
) -> None:
    got: list[ModuleType] = []
    threads = [threading.Thread(target=lambda: got.append(library.core())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [extension] * 8
    assert registrations == ALL
    library._core.cache_clear()
    library._register.cache_clear()


def test_core_without_libraries_where_there_are_devices(
    extension: ModuleType,
    registrations: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library.backend, "backends", lambda: {"cuda": None})
    absent = library.Library(("libabsent.so.1",), (), (), "Install absent.")
    monkeypatch.setitem(library.LIBRARIES, "cublasLt", absent)
    monkeypatch.setitem(library.LIBRARIES, "cuda", library.Library(("libc.so.6",), (), (), ""))
    with pytest.raises(KernelUnavailableError, match="the library cublasLt is missing"):
        library.core()
    assert registrations == []


def test_real_extension_registers_for_cuda() -> None:
    """In a process of its own: what is registered stays."""
    if importlib.util.find_spec("shardops._core") is None:
        pytest.skip("shardops._core is not built: pip install .")
    code = (
        "from shardops.kernels import library; core = library.core();"
        "assert core is library.core(); print(core.ffi_api_version, core.counters())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'gemms_launched': 0" in done.stdout
