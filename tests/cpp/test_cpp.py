"""Builds the C++ tests under sanitizers and runs them; any report fails."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.cpp import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

THREADED = ("gemm_test", "launch_test")
PROGRAMS = (*THREADED, "gemm_scales_test", "gemm_timing_test")
ADDRESS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-O1", "-g1", "-fsanitize=thread")
OFFICIAL = "SHARDOPS_CUBLAS_INCLUDE"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run with the stand-in libraries; sanitizers end the program at their first report."""
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": str(program.parent),
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    return subprocess.run(
        [program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def assert_passes(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout, done.stdout
    assert "ERROR: " not in done.stderr, done.stderr
    assert "WARNING: " not in done.stderr, done.stderr


@pytest.fixture(scope="module")
def address_programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("address")
    build.build_fakes(folder, ADDRESS)
    return {path.name: path for path in build.build_programs(folder, PROGRAMS, ADDRESS)}


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_under_address_and_undefined_sanitizers(
    address_programs: dict[str, Path], program: str
) -> None:
    assert_passes(run(address_programs[program]))


def test_launch_without_a_driver(address_programs: dict[str, Path]) -> None:
    assert_passes(run(address_programs["launch_test"], "missing"))


def test_threads_under_thread_sanitizer(tmp_path: Path) -> None:
    build.build_fakes(tmp_path, THREAD)
    for program in build.build_programs(tmp_path, THREADED, THREAD):
        done = run(program, "threads")
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("the thread sanitizer does not run on this kernel")
        assert_passes(done)


def test_abi_is_the_official_one() -> None:
    cuda, cublas = official_headers()
    if cuda is None:
        pytest.skip("cuda.h is in neither CUDA_HOME, /usr/local/cuda nor site-packages")
    flags = ["-std=c++17", "-fsyntax-only", f"-I{build.SOURCES}", f"-isystem{cuda}"]
    if cublas is not None:
        flags += [f"-isystem{cublas}", "-DSHARDOPS_CHECK_CUBLASLT"]
    done = subprocess.run(
        ["g++", *flags, build.TESTS / "abi_check.cc"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if cublas is None:
        pytest.skip(f"the driver's ABI agrees; cublasLt.h was not found: set {OFFICIAL}")


def official_headers() -> tuple[Path | None, Path | None]:
    """Folders with cuda.h and with cublasLt.h."""
    nvidia = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [
        *(Path(f) for f in (os.environ.get(OFFICIAL),) if f),
        *(Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ),
        Path("/usr/local/cuda/include"),
        *(nvidia / f / "include" for f in ("cu13", "cublas", "cuda_runtime")),
    ]

    def first(header: str) -> Path | None:
        return next((f for f in folders if (f / header).exists()), None)

    return first("cuda.h"), first("cublasLt.h")
