"""What this installation runs on, and where each library is."""

import ctypes
import importlib.metadata
import platform
from collections.abc import Callable

import jax

from shardops.errors import KernelUnavailableError
from shardops.kernels import compile, library
from shardops.version import __version__


def parts() -> dict[str, str | KernelUnavailableError]:
    """Version and path by name; of what is missing, the error that says what was tried."""
    return {
        "shardops": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "extension": _or_missing(_extension),
        "nvrtc": _or_missing(_nvrtc),
        "cublasLt": _or_missing(_cublaslt),
        "driver": _or_missing(_driver),
    }


def _or_missing(find: Callable[[], str]) -> str | KernelUnavailableError:
    try:
        return find()
    except KernelUnavailableError as error:
        return error


def _extension() -> str:
    module = library.load_extension()
    return f"FFI API {'.'.join(map(str, module.ffi_api_version))} {module.__file__}"


def _nvrtc() -> str:
    version = compile.nvrtc_version()  # loads it
    return f"{version} {library.find_library('nvrtc')}"


def _cublaslt() -> str:
    path = library.find_library("cublasLt")
    get_version = ctypes.CDLL(path).cublasLtGetVersion
    get_version.restype = ctypes.c_size_t
    version = get_version()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100} {path}"


def _driver() -> str:
    path = library.find_library("cuda")
    version = ctypes.c_int()
    status = ctypes.CDLL(path).cuDriverGetVersion(ctypes.byref(version))
    if status != 0:
        raise KernelUnavailableError(
            f"kernels: cuDriverGetVersion of {path} returned {status}; expected 0. Reinstall the "
            "NVIDIA driver."
        )
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10} {path}"
