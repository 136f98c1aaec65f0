"""The extension on machines without a GPU: the same handlers for XLA:CPU, on stand-in libraries."""

import ctypes
import functools
import importlib.util
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

import jax

from tests.cpp import build


def missing() -> str | None:
    """Why the test build cannot be made here."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if importlib.util.find_spec("pybind11") is None:
        return "pybind11 is not installed: pip install pybind11"
    return None


@functools.cache
def extension() -> ModuleType:
    """Build it, load it, register its targets for "cpu": once a process, as JAX demands."""
    import pybind11

    folder = Path(tempfile.mkdtemp(prefix="shardops-tests-"))
    try:
        names = ("libfake_cuda.so", "libfake_cublaslt.so")
        build.build_fakes(folder, ["-O2"], *names)
        path = build.build_extension(folder, pybind11.get_include())
        spec = importlib.util.spec_from_file_location("_core", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cuda, cublaslt = (str(folder / name) for name in names)
        module.set_library_paths(driver=cuda, cublaslt=cublaslt)
        module.versions()  # loads both
        library = ctypes.CDLL(str(path))  # the same one again, for the handlers it adds
    finally:
        shutil.rmtree(folder)  # what is loaded stays loaded
    jax.devices()
    for name, registration in module.types().items():
        jax.ffi.register_ffi_type(name, registration, platform="cpu")
    for name, execute in (("launch", "LaunchHostExecute"), ("gemm", "GemmHostExecute")):
        stages = {
            "instantiate": module.targets()[f"shardops_{name}"]["instantiate"],
            "execute": jax.ffi.pycapsule(getattr(library, execute)),
        }
        jax.ffi.register_ffi_target(f"shardops_{name}", stages, platform="cpu")
    return module
