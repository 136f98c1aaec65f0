"""NVRTC, by its C functions: to import a binding of it takes longer than to compile a kernel."""

import ctypes
import functools
import pathlib
from collections.abc import Sequence

from shardops.errors import KernelUnavailableError
from shardops.kernels import library


class RefusedError(RuntimeError):
    """What NVRTC says about a program or an option that it does not take."""


def version() -> tuple[int, int]:
    """Major and minor. Raises KernelUnavailableError where the library is missing."""
    return _version(_library())


def compile_program(text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Compiles to machine code; other threads may do so too.

    Args:
      name: what diagnostics call the text.
      options: as on NVRTC's command line, among them the architecture, "--gpu-architecture=sm_90".
    Returns: the machine code and the log.
    Raises: RefusedError, KernelUnavailableError where the library is missing.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), name.encode(), 0, None, None
    )
    if status != 0:
        raise RefusedError(f"nvrtcCreateProgram: {_words(nvrtc, status)}")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _content(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status != 0:
            raise RefusedError(f"{_words(nvrtc, status)}: {log}")
        return _content(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _content(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    status = getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    status = status or getattr(nvrtc, f"nvrtcGet{what}")(program, content)
    if status != 0:
        raise RefusedError(f"nvrtcGet{what}: {_words(nvrtc, status)}")
    return content.raw


def _words(nvrtc: ctypes.CDLL, status: int) -> str:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc.nvrtcGetErrorString(status).decode()


@functools.cache
def _library() -> ctypes.CDLL:
    path = library.find_library("nvrtc")
    nvrtc = ctypes.CDLL(path)
    # NVRTC opens its built-in functions by name, which finds them where they are loaded already;
    # the linker does not look beside a wheel's library.
    major, minor = _version(nvrtc)
    builtins = pathlib.Path(path).with_name(f"libnvrtc-builtins.so.{major}.{minor}")
    if "/" in path and builtins.exists():
        ctypes.CDLL(str(builtins))
    return nvrtc


def _version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    status = nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if status != 0:
        raise KernelUnavailableError(
            f"kernels: nvrtcVersion returned {status}; expected success. Reinstall the NVRTC that "
            f"is used, {library.find_library('nvrtc')}."
        )
    return major.value, minor.value
