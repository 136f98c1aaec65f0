"""Kernel sources to machine code, through NVRTC, with a memory and a disk cache."""

import hashlib
import importlib
import io
import pathlib
import re
import threading
from dataclasses import dataclass
from typing import Any

from shardops import config, errors
from shardops.kernels.cache import KernelDirectory

_INSTALL = (
    "Install shardops with its extra cuda13 or cuda12 (in a checkout: pip install '.[cuda13]')."
)
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@dataclass
class Counts:
    """Where the kernels of this process came from."""

    memory: int = 0
    pack: int = 0
    disk: int = 0
    compiled: int = 0


counts = Counts()
_memory: dict[str, bytes] = {}
_directories: dict[pathlib.Path, KernelDirectory] = {}
_lock = threading.Lock()


def source_directory() -> pathlib.Path:
    """Finds the device sources: inside the installed package, else beside it in a checkout."""
    package = pathlib.Path(__file__).parents[1]
    for candidate in (package / "csrc" / "kernels", package.parent / "csrc" / "kernels"):
        if candidate.is_dir():
            return candidate
    raise errors.KernelUnavailableError(
        f"kernels: no csrc/kernels in {package} or {package.parent}; expected the device sources. "
        "Reinstall shardops: the installation is incomplete."
    )


def source_text(
    file: str, constants: tuple[tuple[str, int], ...], leave_out: tuple[str, ...] = ()
) -> str:
    """Returns the constants and the file as one text, each include pasted where first named."""
    directory = source_directory()
    seen = set(leave_out)

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (directory / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return "".join(f"#define {name} {value}\n" for name, value in constants) + expand(file)


def cubin(file: str, name: str, constants: tuple[tuple[str, int], ...], arch: str) -> bytes:
    """Returns a kernel's machine code: from memory, the kernel pack, the disk cache, or NVRTC."""
    settings = config.get()
    text = source_text(file, constants)
    # A pack is used where NVRTC may be missing, so its key cannot name NVRTC's version.
    pack_key = _digest(text, arch)
    with _lock:
        if pack_key in _memory:
            counts.memory += 1
            return _memory[pack_key]
        code = None
        if settings.kernel_pack is not None:
            code = _directory(settings.kernel_pack).read(pack_key)
            counts.pack += code is not None
        if code is None:
            code = _compiled(text, name, arch, pack_key, settings)
        _memory[pack_key] = code
        return code


def clear_memory() -> None:
    """Forgets the kernels of this process; the disk cache stays."""
    with _lock:
        _memory.clear()
        _directories.clear()


def compile_text(text: str, name: str, arch: str, *, report: bool = False) -> tuple[bytes, str]:
    """Compiles without caches; returns the machine code and, with `report`, ptxas's account."""
    program_type, options_type = _cuda_core()
    options = options_type(
        name=name, arch=arch, std="c++17", ptxas_options="-v" if report else None
    )
    log = io.StringIO()
    try:
        code = program_type(text, "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core has no one class for what NVRTC refuses
        raise errors.KernelUnavailableError(
            f"kernels: NVRTC {nvrtc_version()} cannot compile {name} for {arch}: {error} "
            "Upgrade nvidia-cuda-nvrtc if it is older than the GPU."
        ) from error
    return bytes(code), log.getvalue()


def nvrtc_version() -> str:
    """Returns NVRTC's version, "13.0"."""
    _cuda_core()
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's error class has changed between releases
        raise errors.KernelUnavailableError(
            f"kernels: the NVRTC library cannot be loaded ({error}); expected libnvrtc of CUDA 12 "
            f"or 13. {_INSTALL}"
        ) from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise errors.KernelUnavailableError(
            f"kernels: nvrtcVersion returned {status}; expected success. {_INSTALL}"
        )
    return f"{major}.{minor}"


def _compiled(text: str, name: str, arch: str, pack_key: str, settings: config.Config) -> bytes:
    if not settings.nvrtc:
        raise errors.KernelUnavailableError(
            f"kernels: {name} for {arch} ({pack_key[:16]}) is not in the kernel pack "
            f"{settings.kernel_pack}, and SHARDOPS_NVRTC=0 forbids compiling it. Build it into the "
            "pack, or unset SHARDOPS_NVRTC."
        )
    disk_key = _digest(pack_key, nvrtc_version())
    directory = _directory(settings.cache_dir / "kernels")
    code = directory.read(disk_key)
    if code is not None:
        counts.disk += 1
        return code
    code, _ = compile_text(text, name, arch)
    counts.compiled += 1
    directory.write(disk_key, code)
    return code


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _directory(path: pathlib.Path) -> KernelDirectory:
    return _directories.setdefault(path, KernelDirectory(path))


def _cuda_core() -> tuple[Any, Any]:
    try:
        module: Any = importlib.import_module("cuda.core")
        return module.Program, module.ProgramOptions
    except (ImportError, AttributeError) as error:  # old ones had them elsewhere
        raise errors.KernelUnavailableError(
            f"kernels: cuda-core 1.0 or newer cannot be imported ({error}); expected it for "
            f"compiling kernels. {_INSTALL}"
        ) from error
