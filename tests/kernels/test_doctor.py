"""`python -m shardops doctor`, in installations and environments that lack something."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from shardops import __main__ as command_line
from shardops import config, version
from shardops.errors import KernelUnavailableError
from shardops.kernels import cache, compile, doctor, versions

ROOT = Path(__file__).parents[2]
WHOLE = {
    "shardops": "0.1.0",
    "python": "3.12.1",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "extension": "FFI API 0.3",
    "nvrtc": "13.0 /lib/libnvrtc.so.13",
    "cublasLt": "13.1.0 /lib/libcublasLt.so.13",
    "driver": "CUDA 13.0 /lib/libcuda.so.1",
}
TENSOR, BLOCKS, MXFP8 = (f"gemm of 8-bit operands, {name}" for name in doctor._SCALES)


def gpu(capability: str, name: str = "NVIDIA H200") -> SimpleNamespace:
    client = SimpleNamespace(platform_version="cuda 13000")
    return SimpleNamespace(
        client=client, device_kind=name, compute_capability=capability, core_count=132
    )


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that has everything; called, what a doctor finds on it after these changes."""
    for name in [n for n in os.environ if n.startswith("SHARDOPS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SHARDOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "check_arch", lambda arch: None)

    def examined(*, missing=(), capability="9.0", arch=None, **environment):
        parts = dict(WHOLE)
        for name in missing:
            parts[name] = KernelUnavailableError(f"kernels: {name} is not there")
        monkeypatch.setattr(versions, "parts", lambda: parts)
        monkeypatch.setattr(jax, "devices", lambda: [gpu(capability)] if capability else [])
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        config.get.cache_clear()
        return doctor.examined(arch)

    yield examined
    config.get.cache_clear()


def test_doctor_finds_nothing_in_the_way(machine):
    found = machine()
    assert found.problems == []
    assert found.sections["devices"] == {"NVIDIA H200": "1; sm_90, 132 multiprocessors"}
    runs = found.sections["what runs on sm_90"]
    assert runs["gemm"] == "cuBLASLt"
    assert runs["rms_norm"] == "kernels by NVRTC"
    assert runs[TENSOR].startswith("native: FP8 tensor cores")
    assert runs[BLOCKS].startswith("native: FP8 tensor cores")
    assert runs[MXFP8].startswith("dequantised")
    assert "sm_90 has no MXFP8 tensor cores" in runs[MXFP8]
    assert found.text().endswith("problems\n  none")


@pytest.mark.parametrize(
    "capability, native", [("8.0", []), ("8.9", [TENSOR]), ("10.0", [TENSOR, MXFP8])]
)
def test_doctor_says_which_8_bit_products_are_native(machine, capability, native):
    found = machine(capability=capability)
    runs = found.sections[f"what runs on sm_{capability.replace('.', '')}"]
    ways = {name: runs[name].split(":")[0] for name in (TENSOR, BLOCKS, MXFP8)}
    assert [name for name, way in ways.items() if way == "native"] == native
    assert found.problems == []


@pytest.mark.parametrize(
    "missing, broken",
    [
        ("nvrtc", ["layer_norm", "rms_norm", "softmax", "quantize"]),
        ("cublasLt", ["gemm", "dot_general", TENSOR, BLOCKS, MXFP8]),
        ("extension", ["gemm", "dot_general", "layer_norm", "rms_norm", "softmax", "quantize"]),
        ("driver", []),
    ],
)
def test_doctor_names_what_is_missing(machine, monkeypatch, missing, broken):
    def no_nvrtc(arch):
        raise KernelUnavailableError("kernels: nvrtc is not there")

    if missing == "nvrtc":
        monkeypatch.setattr(compile, "check_arch", no_nvrtc)
    found = machine(missing=[missing])
    assert found.problems == [f"kernels: {missing} is not there"]
    runs = found.sections["what runs on sm_90"]
    assert {name for name, way in runs.items() if way.startswith("fails")} >= set(broken)
    of_others = {"gemm", "rms_norm"} - set(broken)
    assert not any(runs[name].startswith("fails") for name in of_others)
    # A CPU needs none of them.
    found = machine(missing=["nvrtc", "cublasLt", "extension", "driver"], capability=None)
    assert found.problems == []
    assert found.sections["what runs on cpu"]["gemm"] == "jnp"


def test_doctor_heeds_an_old_cublaslt(machine, monkeypatch):
    monkeypatch.setitem(WHOLE, "cublasLt", "12.6.4 /lib/libcublasLt.so.12")
    runs = machine().sections["what runs on sm_90"]
    assert runs[TENSOR].startswith("native")
    assert runs[BLOCKS] == "dequantised: cuBLASLt is older than 12.9"


@pytest.mark.parametrize(
    "variable, value, says",
    [
        ("SHARDOPS_NVRTC", "yes", "SHARDOPS_NVRTC is 'yes'; expected 0 or 1."),
        ("SHARDOPS_KERNELS", "(", r"SHARDOPS_KERNELS is '\('; expected a regular expression"),
        ("SHARDOPS_SM_MARGIN", "-1", "SHARDOPS_SM_MARGIN is '-1'; expected an integer >= 0."),
        ("SHARDOPS_AUTOTUN", "1", "SHARDOPS_AUTOTUN is no setting; perhaps SHARDOPS_AUTOTUNE"),
        ("SHARDOPS_NVRTC", "0", "SHARDOPS_NVRTC is 0, and there is no pack"),
        ("SHARDOPS_KERNEL_PACK", "x" * 300, "SHARDOPS_KERNEL_PACK is xxx"),
        ("SHARDOPS_KERNEL_PACK", "/nowhere", "SHARDOPS_KERNEL_PACK is /nowhere; expected a direc"),
    ],
)
def test_doctor_names_wrong_settings(machine, variable, value, says):
    found = machine(**{variable: value})
    [problem] = found.problems
    assert re.search(says, problem)
    assert variable in found.sections["settings"]


def test_doctor_says_which_ops_were_taken_from_kernels(machine):
    runs = machine(SHARDOPS_KERNELS="gemm|softmax.*").sections["what runs on sm_90"]
    assert runs["gemm"].startswith("cuBLASLt; its gradient: jnp; SHARDOPS_KERNELS is 'gemm|so")
    assert runs["rms_norm"] == "jnp: SHARDOPS_KERNELS is 'gemm|softmax.*'"
    assert runs["softmax"] == "kernels by NVRTC"


def test_doctor_tries_to_write_the_cache(machine, tmp_path):
    found = machine()
    assert found.sections["directories"]["cache"].endswith(
        "writable, 0 kernels, 0 tuned algorithms"
    )
    assert list((tmp_path / "cache").iterdir()) == []
    blocked = tmp_path / "file"
    blocked.write_text("")
    [problem] = machine(SHARDOPS_CACHE_DIR=blocked).problems
    assert re.search(rf"{blocked}: cannot be written .*Point SHARDOPS_CACHE_DIR at", problem)


def test_doctor_counts_damaged_kernels(machine, tmp_path):
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / f"{'0' * 64}.kernel").write_text("no kernel")
    found = machine(SHARDOPS_KERNEL_PACK=pack)
    held = "0 kernels, 1 damaged or foreign files"
    assert found.sections["directories"]["pack"] == f"{pack}: {held}"
    [problem] = found.problems
    assert f"{pack} has 1 damaged or foreign files" in problem
    cached = tmp_path / "cache" / "kernels"
    cached.mkdir(parents=True)
    (cached / f"{'0' * 64}.kernel").write_text("of another version")
    found = machine(SHARDOPS_KERNEL_PACK="")
    assert held in found.sections["directories"]["cache"]
    assert found.problems == []


def test_doctor_asks_for_nothing_where_no_op_is_a_kernel(machine):
    missing = ("extension", "cublasLt", "driver", "nvrtc")
    assert machine(missing=missing, SHARDOPS_KERNELS="", SHARDOPS_NVRTC="0").problems == []


def test_doctor_names_a_pack_that_cannot_be_read(machine, monkeypatch, tmp_path):
    def entries(directory):
        if directory.path == tmp_path / "pack":
            raise PermissionError(13, "Permission denied", str(directory.path))
        return []

    (tmp_path / "pack").mkdir()
    monkeypatch.setattr(cache.KernelDirectory, "entries", entries)
    found = machine(SHARDOPS_KERNEL_PACK=tmp_path / "pack")
    [problem] = found.problems
    assert f"{tmp_path / 'pack'} cannot be read ([Errno 13] Permission denied" in problem
    assert "cannot be read" in found.sections["directories"]["pack"]


def test_doctor_refuses_old_gpus_and_versions_of_jax(machine, monkeypatch):
    [problem] = machine(capability="7.0").problems
    assert "compute capability of NVIDIA H200 is 7.0; expected 8.0 or newer" in problem
    assert machine(capability="7.0", SHARDOPS_KERNELS="").problems == []
    monkeypatch.delenv("SHARDOPS_KERNELS")
    monkeypatch.setattr(jax, "__version__", "0.9.1")
    [problem] = machine().problems
    assert problem.startswith(f"jax is 0.9.1; expected {version.OLDEST_JAX} or newer")
    wanted = re.search(r'"jax>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    assert wanted[1] == version.OLDEST_JAX


def test_doctor_survives_a_backend_that_does_not(machine, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    found = machine()
    monkeypatch.setattr(jax, "devices", devices)
    found = doctor.examined()
    assert found.problems == ["JAX finds no devices: Unable to initialize backend 'cuda'"]


def test_doctor_of_a_gpu_that_is_elsewhere(machine):
    found = machine(capability=None, arch="sm_100", missing=["driver"])
    assert found.problems == []
    assert found.sections["what runs on sm_100"][MXFP8].startswith("native")
    # Its scales are brought into cuBLASLt's order by a kernel.
    without = machine(capability=None, arch="sm_100", missing=["driver"], SHARDOPS_NVRTC=0)
    runs = without.sections["what runs on sm_100"]
    assert runs[MXFP8] == "fails: SHARDOPS_NVRTC is 0, and there is no pack"
    assert runs[TENSOR].startswith("native")
    # Nothing else may want one.
    alone = machine(capability="10.0", SHARDOPS_KERNELS="gemm.*", SHARDOPS_NVRTC=0)
    assert alone.problems == [f"kernels for sm_100: {runs[MXFP8]}"]
    assert machine(capability="9.0", SHARDOPS_KERNELS="gemm.*", SHARDOPS_NVRTC=0).problems == []


@pytest.mark.parametrize("arch", ["hopper", "sm_75", "sm_90a"])
def test_doctor_takes_the_architectures_that_packs_are_built_for(arch, capsys):
    said = []
    build = ["kernels", "build", "--op=all", "--rows-length=1", "--out=p"]
    for words in (["doctor"], build):
        with pytest.raises(SystemExit):
            command_line.parser().parse_args([*words, f"--arch={arch}"])
        said.append(capsys.readouterr().err.partition("argument --arch: ")[2])
    assert said[0] == said[1]
    assert f"is '{arch}'; expected" in said[0]


def test_doctor_as_a_command(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"SHARDOPS_CACHE_DIR": str(tmp_path), "SHARDOPS_SM_MARGIN": "many"}
    done = subprocess.run(
        [sys.executable, "-m", "shardops", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["jax"] == jax.__version__
    [problem] = [p for p in found["problems"] if "SM_MARGIN" in p]
    assert "expected an integer >= 0" in problem
