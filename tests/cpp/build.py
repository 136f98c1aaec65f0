"""Compiles the extension's sources for the tests, with g++ and no CUDA."""

import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc"
TESTS = ROOT / "tests" / "cpp"
# What the tests of the classes need: the FFI handlers need XLA to be called.
CLASSES = (
    "aligned_copies.cc",
    "driver.cc",
    "kernel.cc",
    "cublaslt.cc",
    "gemm_problem.cc",
    "gemm_plan.cc",
    "gemm_descriptors.cc",
    "gemm_timing.cc",
)
_JOBS = 2
_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-pthread")


def compile_all(folder: Path, sources: Sequence[Path], flags: Sequence[str]) -> dict[str, Path]:
    """Compile in parallel; returns the object files by the sources' names."""
    includes = (f"-I{SOURCES}", f"-I{TESTS}", "-isystem", jax.ffi.include_dir())
    objects = {source.name: folder / f"{source.stem}.o" for source in sources}

    def one(source: Path) -> None:
        _run("-c", str(source), "-o", str(objects[source.name]), *_FLAGS, *includes, *flags)

    with ThreadPoolExecutor(_JOBS) as pool:
        list(pool.map(one, sources))
    return objects


def link(output: Path, objects: Sequence[Path], flags: Sequence[str]) -> None:
    """Link a program, or with `-shared` a library."""
    rpath = ("-Wl,-rpath,$ORIGIN", f"-L{output.parent}")
    _run(*map(str, objects), "-o", str(output), "-pthread", *rpath, *flags, "-ldl")


def build_fakes(
    folder: Path,
    flags: Sequence[str],
    cuda: str = "libcuda.so.1",
    cublaslt: str = "libcublasLt.so.13",
) -> None:
    """The stand-ins for libcuda and libcublasLt, under the real ones' names or others.

    A process that goes on to use the real ones needs other names: what is loaded under a name is
    what everybody gets who asks for it.
    """
    driver = ("fake_cuda.cc", "fake_cuda_streams.cc")
    blas = ("fake_cublaslt.cc", "fake_matmul.cc")
    sources = [TESTS / name for name in (*driver, *blas)]
    made = compile_all(folder, sources, ["-fvisibility=default", *flags])
    link(folder / cuda, [made[name] for name in driver], ["-shared", *flags])
    link(
        folder / cublaslt,
        [made[name] for name in blas],
        ["-shared", *flags, f"-l:{cuda}"],
    )


def build_programs(folder: Path, names: Sequence[str], flags: Sequence[str]) -> list[Path]:
    """Test programs, linked with the classes."""
    sources = [*(SOURCES / name for name in CLASSES), *(TESTS / f"{name}.cc" for name in names)]
    made = compile_all(folder, sources, flags)
    classes = [made[name] for name in CLASSES]
    for name in names:
        link(folder / name, [*classes, made[f"{name}.cc"]], [*flags, "-l:libcuda.so.1"])
    return [folder / name for name in names]


def build_extension(folder: Path, include: str) -> Path:
    """The whole extension with handlers for XLA:CPU beside its own; `include` is pybind11's."""
    sources = [*sorted(SOURCES.glob("*.cc")), TESTS / "host_handlers.cc"]
    flags = ["-O1", "-isystem", include, "-isystem", sysconfig.get_path("include")]
    made = compile_all(folder, sources, flags)
    output = folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    link(output, list(made.values()), ["-shared"])
    return output


def _run(*arguments: str) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join(arguments)} failed:\n{done.stderr}")
