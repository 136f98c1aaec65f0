"""Reported case 33: NVRTC and cuBLASLt, found or not, in environments of many kinds.

Each is a process of its own, as what is loaded stays. None needs a GPU: kernels are compiled.
"""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from shardops import errors
from shardops.kernels import compile

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

COMPILES = """
import json
from shardops import errors
from shardops.kernels import compile, library, versions
from tests.kernels.take_kernels import ARCH, KERNELS
out = {"report": {name: str(found) for name, found in versions.parts().items()}}
try:
    kernel = KERNELS[1]
    code, about = compile.compile_kernel(kernel.file, kernel.name, kernel.constants, ARCH)
    out |= {"elf": code[:4] == b"\\x7fELF", "nvrtc": about["nvrtc"]}
except errors.KernelUnavailableError as error:
    out["error"] = str(error)
out["loaded"] = library.loaded("nvrtc")
print(json.dumps(out))
"""

needs_wheel = pytest.mark.skipif(
    not compile.compiler().startswith("nvidia-"), reason="NVRTC is no wheel here"
)


def process(*options: str, **changes: str | None) -> dict:
    """What a process says whose environment has these changes; a variable of None is unset."""
    whole = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **changes}
    done = subprocess.run(
        [sys.executable, *options, "-c", COMPILES],
        cwd=ROOT,
        env={name: value for name, value in whole.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BARE: dict[str, str | None] = {"CUDA_HOME": None, "CUDA_PATH": None, "LD_LIBRARY_PATH": None}


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> pathlib.Path:
    """A toolkit of a wrong version: libraries that load, and have none of the functions."""
    home = tmp_path_factory.mktemp("cuda")
    (home / "lib64").mkdir()
    whole = home / "lib64" / "libstub.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(whole)]
    code = 'extern "C" int nvrtcOfAnotherVersion() { return 11; }\n'
    subprocess.run(command, input=code, text=True, check=True)
    for name in ("nvrtc", "cublasLt", "cudart"):
        for version in (11, 12, 13):
            shutil.copy(whole, home / "lib64" / f"lib{name}.so.{version}")
    return home


@needs_wheel
@pytest.mark.parametrize("case", ["bare", "homes", "linker"])
def test_case_33_the_wheel_is_found_and_nothing_is_mixed(case, stub):
    """Without a toolkit; with one of another version in CUDA_HOME; in the linker's path too."""
    changes = dict(BARE)
    if case != "bare":
        changes |= {"CUDA_HOME": str(stub), "CUDA_PATH": str(stub)}
    if case == "linker":
        changes["LD_LIBRARY_PATH"] = str(stub / "lib64")
    seen = process(**changes)
    assert seen["elf"]
    (path,) = seen["loaded"]
    assert "/nvidia/" in path
    assert not path.startswith(str(stub))
    wheel = importlib.metadata.version("nvidia-cuda-nvrtc")
    assert wheel.startswith(f"{seen['nvrtc']}.")
    assert seen["report"]["nvrtc"] == f"{seen['nvrtc']} {path}"


def test_case_33_what_is_missing_is_reported_with_all_that_was_tried(stub, tmp_path):
    """An environment whose site-packages have nothing of NVIDIA's, and a stub: it is not used, and
    where there is no other library the report names it and what it lacks."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in map(pathlib.Path, dict.fromkeys(sys.path)):
        for entry in folder.iterdir() if "site-packages" in folder.name else ():
            if not entry.name.startswith("nvidia") and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    homes = {"CUDA_HOME": str(stub), "CUDA_PATH": str(stub)}
    # -S: without the site-packages of this environment.
    seen = process("-S", **{**BARE, **homes, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"})
    if "error" in seen:
        assert "the library nvrtc is missing" in seen["error"]
        for version in (12, 13):
            tried = stub / "lib64" / f"libnvrtc.so.{version}"
            assert f"{tried} (lacks nvrtcVersion, " in seen["error"]
        assert "pip install" in seen["error"]
        assert (
            seen["report"]["nvrtc"].partition(" Tried: ")[0]
            == seen["error"].partition(" Tried: ")[0]
        )
    else:  # the system has one
        assert seen["elf"]
        assert not any(path.startswith(str(stub)) for path in seen["loaded"])
    cublaslt = seen["report"]["cublasLt"]
    assert not cublaslt.endswith(str(stub / "lib64" / "libcublasLt.so.13"))
    if "is missing" in cublaslt:
        for version in (12, 13):
            tried = stub / "lib64" / f"libcublasLt.so.{version}"
            assert f"{tried} (lacks cublasLtGetVersion, cublasLtMatmul)" in cublaslt
        assert "jax[cuda13]" in cublaslt
    assert seen["report"]["jaxlib"] == importlib.metadata.version("jaxlib")
