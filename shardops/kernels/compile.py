"""Kernel sources to machine code, through NVRTC, with a memory and a disk cache."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import pathlib
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardops import config, errors
from shardops.kernels import nvrtc
from shardops.kernels.cache import FORMAT, KernelDirectory
from shardops.kernels.forking import undivided
from shardops.kernels.resources import resources
from shardops.version import __version__

Constants = tuple[tuple[str, int], ...]

_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
# The options that decide what machine code comes out, part of every key.
_STANDARD = "c++17"
# Leaves out what a kernel without toolkit headers cannot name (textures, the runtime API): 4 of the
# 24 ms that NVRTC takes for an empty kernel, and the same machine code.
_MINIMAL_SINCE = (12, 4)
_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")

_CACHE_ADVICE = (
    "Kernels are compiled anew in this process. Point SHARDOPS_CACHE_DIR at a writable directory "
    "of your own; `python -m shardops kernels clear` empties it."
)
_PACK_ADVICE = (
    "Its kernels are taken from the cache or compiled, unless SHARDOPS_NVRTC=0. Correct "
    "SHARDOPS_KERNEL_PACK, or fill it by `python -m shardops kernels build`."
)


@dataclass
class Counts:
    """Where the kernels of this process came from."""

    memory: int = 0
    pack: int = 0
    disk: int = 0
    compiled: int = 0


@dataclass
class _Kernel:
    """A kernel of this process; `code` is None until it is found or compiled, under `lock`.

    Args:
      origin: what its next use counts as.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    code: bytes | None = None
    origin: str = "memory"


counts = Counts()
_memory: dict[str, _Kernel] = {}
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


def source_text(file: str, constants: Constants, leave_out: tuple[str, ...] = ()) -> str:
    """Returns the constants and the file as one text, each include pasted where first named."""
    return "".join(f"#define {name} {value}\n" for name, value in constants) + _expanded(
        file, leave_out
    )


@functools.cache
def _expanded(file: str, leave_out: tuple[str, ...]) -> str:
    directory = source_directory()
    seen = set(leave_out)

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (directory / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return expand(file)


def key_of(file: str, name: str, constants: Constants, arch: str) -> str:
    """Names a kernel in a pack: by its source, its symbol, its architecture, not by its compiler.

    A pack is used where NVRTC may be missing, so its key cannot name NVRTC's version. It names the
    format of entries: versions of shardops that share a directory do not take each other's.
    """
    return _digest(source_text(file, constants), name, arch, _STANDARD, FORMAT.decode())


@undivided()
def cubin(file: str, name: str, constants: Constants, arch: str) -> bytes:
    """Returns a kernel's machine code: from memory, the kernel pack, the disk cache, or NVRTC.

    Raises: KernelUnavailableError where it is in none, and cannot or must not be compiled.
    """
    kernel, code = _taken(file, name, constants, arch)
    with _lock:
        setattr(counts, kernel.origin, getattr(counts, kernel.origin) + 1)
        kernel.origin = "memory"
    return code


@undivided()
def begin(file: str, name: str, constants: Constants, arch: str) -> None:
    """Starts to get a kernel that `cubin` will be asked for soon: NVRTC uses one core a kernel."""
    key = key_of(file, name, constants, arch)
    with _lock:
        if key in _memory:  # or on its way there
            return

    @undivided()
    def take() -> None:
        with suppress(errors.KernelUnavailableError):  # which `cubin` raises where it is wanted
            _taken(file, name, constants, arch)

    threading.Thread(target=take).start()


def _taken(file: str, name: str, constants: Constants, arch: str) -> tuple[_Kernel, bytes]:
    key = key_of(file, name, constants, arch)
    with _lock:
        kernel = _memory.setdefault(key, _Kernel())
    # Threads that want the same kernel wait for it, others do not.
    with kernel.lock:
        if kernel.code is None:
            kernel.origin, kernel.code = _found(key, file, name, constants, arch)
        return kernel, kernel.code


@undivided()
def available(file: str, name: str, constants: Constants, arch: str) -> bool:
    """Whether a kernel may be had: for what does without, NVRTC itself is not asked."""
    settings = config.get()
    if settings.nvrtc or settings.kernel_pack is None:
        return settings.nvrtc
    key = key_of(file, name, constants, arch)
    return _once(pack_directory(settings.kernel_pack)).read(key) is not None


@undivided()
def clear_memory() -> None:
    """Forgets the kernels and sources of this process; the disk cache stays."""
    with _lock:
        _memory.clear()
        _directories.clear()
    _expanded.cache_clear()


def compile_kernel(
    file: str, name: str, constants: Constants, arch: str
) -> tuple[bytes, dict[str, Any]]:
    """Compiles without caches; returns the machine code and the account that is kept with it."""
    text = source_text(file, constants)
    # Instructions that no other architecture has ask for a target of their own.
    exact = f"{arch}a" if "wgmma" in text else arch
    code, report = compile_text(text, name, exact, report=True)
    taken = resources(report)
    about = {
        "kernel": name,
        "arch": arch,
        "file": file,
        "constants": dict(constants),
        "code_bytes": len(code),
        "resources": None if taken is None else dataclasses.asdict(taken),
        "nvrtc": nvrtc_version(),
        "shardops": __version__,
    }
    return code, about


@undivided()
def compile_text(text: str, name: str, arch: str, *, report: bool = False) -> tuple[bytes, str]:
    """Compiles without caches; returns the machine code and, with `report`, ptxas's account.

    Raises: KernelUnavailableError with NVRTC's own words where it refuses.
    """
    compiler = f"NVRTC {nvrtc_version()}"
    options = [f"--gpu-architecture={arch}", f"--std={_STANDARD}"]
    if nvrtc.version() >= _MINIMAL_SINCE:
        options.append("--minimal")
    if report:
        options.append("--ptxas-options=-v")
    try:
        return nvrtc.compile_program(text, name, options)
    except nvrtc.RefusedError as error:
        if "gpu-architecture" in str(error):
            words = " ".join(str(error).split())
            raise errors.KernelUnavailableError(
                f"kernels: architecture is {arch}, which {compiler} refuses ({words}); expected "
                "one that it knows, such as sm_90. Correct it, or upgrade nvidia-cuda-nvrtc if it "
                "is older than the GPU."
            ) from error
        raise errors.KernelUnavailableError(
            f"kernels: {compiler} cannot compile {name} for {arch}: {error} "
            "Upgrade nvidia-cuda-nvrtc if it is older than the GPU."
        ) from error


def check_arch(arch: str) -> None:
    """Raises KernelUnavailableError where NVRTC is missing or does not know an architecture."""
    nvrtc_version()  # missing is told before refused
    compile_text('extern "C" __global__ void empty() {}', "empty", arch)


def nvrtc_version() -> str:
    """Returns NVRTC's version, "13.0"."""
    return ".".join(map(str, nvrtc.version()))


@functools.cache
def compiler() -> str:
    """Names the compiler in the keys of the disk cache.

    By its wheel where there is one: to load NVRTC takes longer than to read a kernel, and a process
    whose kernels are all on disk need not; and the wheel's version has the patch level, which NVRTC
    itself does not tell.
    """
    found = []
    for wheel in _WHEELS:
        try:
            found.append(f"{wheel} {importlib.metadata.version(wheel)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or f"nvrtc {nvrtc_version()}"


def pack_directory(path: pathlib.Path) -> KernelDirectory:
    """A directory of kernels that was filled ahead of time."""
    return KernelDirectory(path, _PACK_ADVICE, required=True)


def cache_directory(settings: config.Config) -> KernelDirectory:
    """The directory that this user's processes leave their kernels in."""
    return KernelDirectory(settings.cache_dir / "kernels", _CACHE_ADVICE)


def _found(key: str, file: str, name: str, constants: Constants, arch: str) -> tuple[str, bytes]:
    """A kernel that is not in memory, and where it came from."""
    settings = config.get()
    if settings.kernel_pack is not None:
        code = _once(pack_directory(settings.kernel_pack)).read(key)
        if code is not None:
            return "pack", code
    if not settings.nvrtc:
        from shardops.kernels import packing  # the launch plans, which import this module

        raise errors.KernelUnavailableError(
            packing.missing(settings.kernel_pack, file, name, constants, arch)
        )
    directory = _once(cache_directory(settings))
    disk_key = _digest(key, compiler())
    code = directory.read(disk_key)
    if code is not None:
        return "disk", code
    code, about = compile_kernel(file, name, constants, arch)
    directory.write(disk_key, code, about)
    return "compiled", code


def _once(directory: KernelDirectory) -> KernelDirectory:
    """The one of this path that this process keeps, which has warned or not."""
    with _lock:
        return _directories.setdefault(directory.path, directory)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
