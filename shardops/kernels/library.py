"""The C++ extension, registered with JAX, and the CUDA libraries that it calls."""

import ctypes
import functools
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.extend import backend

from shardops.errors import KernelUnavailableError
from shardops.kernels.forking import undivided


@dataclass(frozen=True)
class Library:
    """A shared library of CUDA's.

    Args:
      sonames: its file names, the preferred one first.
      folders: where NVIDIA's wheels put it, under site-packages/nvidia.
      symbols: functions of every version that will do.
      fix: how to get it.
      shared: with JAX; what the process has loaded goes before what is installed.
    """

    sonames: tuple[str, ...]
    folders: tuple[str, ...]
    symbols: tuple[str, ...]
    fix: str
    shared: bool = True


LIBRARIES = {
    "cuda": Library(
        ("libcuda.so.1",),
        (),
        ("cuInit", "cuLibraryLoadData", "cuLaunchKernelEx"),
        "Install the NVIDIA driver, 525 or newer.",
    ),
    "cublasLt": Library(
        ("libcublasLt.so.13", "libcublasLt.so.12"),
        ("cu13/lib", "cublas/lib"),
        ("cublasLtGetVersion", "cublasLtMatmul"),
        "Install jax[cuda13] or jax[cuda12], which bring it, or set CUDA_HOME to a CUDA toolkit.",
    ),
    "nvrtc": Library(
        ("libnvrtc.so.13", "libnvrtc.so.12"),
        ("cu13/lib", "cuda_nvrtc/lib"),
        ("nvrtcVersion", "nvrtcCompileProgram", "nvrtcGetCUBIN"),
        "pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12, or set CUDA_HOME to a "
        "CUDA toolkit.",
        # What kernels are compiled by, and known by on disk, is not to depend on what else a
        # program imports; and the newer one may know a GPU that another package's does not.
        shared=False,
    ),
}

_lock = threading.Lock()


def core() -> ModuleType:
    """Return `shardops._core`, its FFI types and targets registered with JAX.

    A process without CUDA devices can lower for them, so there it needs none of CUDA's libraries.
    Call it too before running a program that was deserialised rather than lowered here.

    Raises: KernelUnavailableError where the extension or a library is missing.
    """
    has_devices = "cuda" in backend.backends()  # types must be registered after the backend exists
    with undivided(), _lock:
        return _core(has_devices)


@functools.cache
def _core(has_devices: bool) -> ModuleType:
    extension = load_extension()
    if has_devices:
        extension.set_library_paths(driver=find_library("cuda"), cublaslt=find_library("cublasLt"))
    _register(extension)
    return extension


def load_extension() -> ModuleType:
    """Return `shardops._core`, not registered; KernelUnavailableError where it is missing."""
    try:
        return importlib.import_module("shardops._core")
    except ImportError as error:
        raise KernelUnavailableError(
            f"kernels: the extension shardops._core cannot be imported ({error}); expected it "
            "beside the package. Reinstall shardops with a C++ compiler at hand (in a checkout: "
            "pip install --force-reinstall --no-deps .)."
        ) from error


@functools.cache
def _register(extension: ModuleType) -> None:
    for name, registration in extension.types().items():  # handlers refer to their types
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")
    for name, stages in extension.targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")


def find_library(name: str) -> str:
    """Return what to dlopen for "cuda", "cublasLt" or "nvrtc": a path, or a name the linker knows.

    Looks at what the process has loaded (JAX's own, so that versions never mix), NVIDIA's wheels,
    CUDA_HOME and CUDA_PATH, and the linker's search path; for NVRTC at the wheels first. A library
    that does not load, or lacks a function that is needed, is passed over.

    Raises: KernelUnavailableError that lists all that was tried.
    """
    library = LIBRARIES[name]
    tried: dict[str, str] = {}
    for candidate in _candidates(library):
        if candidate in tried:  # folders are named more than once
            continue
        complaint = _complaint(candidate, library)
        if complaint is None:
            return candidate
        tried[candidate] = complaint
    complaints = "; ".join(f"{candidate} ({complaint})" for candidate, complaint in tried.items())
    raise KernelUnavailableError(
        f"kernels: the library {name} is missing; expected one of {', '.join(library.sonames)}. "
        f"{library.fix} Tried: {complaints}."
    )


def loaded(name: str) -> list[str]:
    """Return the paths of "cuda", "cublasLt" or "nvrtc" that are loaded in this process."""
    return _loaded(LIBRARIES[name].sonames)


def _candidates(library: Library) -> Iterator[str]:
    if library.shared:
        yield from _loaded(library.sonames)
    yield from _in_wheels(library)
    if not library.shared:
        yield from _loaded(library.sonames)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            for folder in ("lib64", "lib", "targets/x86_64-linux/lib"):
                for soname in library.sonames:
                    path = Path(home) / folder / soname
                    if path.exists():
                        yield str(path)
    yield from library.sonames


def _in_wheels(library: Library) -> Iterator[str]:
    for root in sys.path:
        for folder in library.folders:
            for soname in library.sonames:
                path = Path(root) / "nvidia" / folder / soname
                if path.exists():
                    yield str(path)


class _Object(ctypes.Structure):
    """The first fields of C's dl_phdr_info."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _loaded(sonames: tuple[str, ...]) -> list[str]:
    """By the dynamic linker's list: /proc/self/maps of a process with a GPU takes milliseconds."""
    paths: set[str] = set()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Object), ctypes.c_size_t, ctypes.c_void_p)
    def note(found: Any, size: int, data: Any) -> int:
        del size, data
        paths.add(os.fsdecode(found.contents.name or b""))
        return 0

    # With the interpreter's lock: whoever imports holds it and waits for the linker's, held here.
    walk = getattr(ctypes.PyDLL(None), "dl_iterate_phdr", None)
    if walk is None:  # not Linux
        return []
    walk(note, None)
    return sorted(p for p in paths if Path(p).name.startswith(sonames))


def _complaint(candidate: str, library: Library) -> str | None:
    try:
        loaded = ctypes.CDLL(candidate)
    except OSError as error:
        return str(error).removeprefix(f"{candidate}: ")
    missing = [symbol for symbol in library.symbols if not hasattr(loaded, symbol)]
    return f"lacks {', '.join(missing)}" if missing else None
