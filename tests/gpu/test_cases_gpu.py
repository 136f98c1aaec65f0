"""Reported cases on a GPU: 2, 3, 4, 6, 7, 9, 20 of norms, 10 to 13 of softmax, by their kernels;
33, 34 and 38 of whole processes. Case 35 needs two GPUs: multi_gpu/test_cases_multi_gpu.py."""

import json
import pathlib
import re

import numpy as np
import pytest

from tests.gpu.programs import run
from tests.reported_norms import ReportedNorms
from tests.reported_softmax import ReportedSoftmax


class TestNorms(ReportedNorms):
    on_gpu = True


class TestSoftmax(ReportedSoftmax):
    on_gpu = True


def one_norm(cache: pathlib.Path, **environment: str | None) -> dict:
    """A process that compiles what `cache` does not have."""
    out = run("", "-m", "tests.gpu.one_norm", SHARDOPS_CACHE_DIR=str(cache), **environment)
    found = json.loads(out.splitlines()[-1])
    assert max(found["errors"]) < 1e-5
    return found


def test_case_33_stubs_of_another_version_are_passed_over(tmp_path):
    """CUDA_HOME and CUDA_PATH name what is no toolkit, and LD_LIBRARY_PATH is unset."""
    stub = tmp_path / "cuda"
    (stub / "lib64").mkdir(parents=True)
    for name in ("nvrtc", "cublasLt", "cudart"):
        for version in (11, 12, 13):
            (stub / "lib64" / f"lib{name}.so.{version}").write_text("not a library")
    homes = {"CUDA_HOME": str(stub), "CUDA_PATH": str(stub)}
    found = one_norm(tmp_path / "cache", LD_LIBRARY_PATH=None, **homes)
    if not found["compiler"].startswith("nvidia-"):
        pytest.skip("NVRTC is the system's here: no wheel to find")
    assert found["counts"]["compiled"] > 0
    names = [re.search(r"/lib(\w+)\.so", path)[1] for path in found["libraries"]]
    assert sorted(names) == ["cublasLt", "nvrtc"], f"one of each: {found['libraries']}"
    assert not any(path.startswith(str(tmp_path)) for path in found["libraries"])


def test_case_34_truncated_cubins_are_compiled_anew(tmp_path):
    """They never reach the driver; the results are the same, and so are the files afterwards."""
    cold = one_norm(tmp_path)
    files = sorted((tmp_path / "kernels").iterdir())
    assert cold["counts"]["compiled"] == len(files) > 0
    whole = {path: path.read_bytes() for path in files}
    for n, (path, data) in enumerate(whole.items()):
        path.write_bytes(data[: len(data) * (n + 1) // (len(whole) + 1)])
    repaired = one_norm(tmp_path)
    assert len(repaired["warnings"]) == 1
    assert "damaged" in repaired["warnings"][0]
    assert repaired["counts"] == cold["counts"]
    assert sorted((tmp_path / "kernels").iterdir()) == files
    warm = one_norm(tmp_path)
    assert (warm["counts"]["disk"], warm["counts"]["compiled"]) == (len(files), 0)
    assert warm["warnings"] == []
    assert cold["digest"] == repaired["digest"] == warm["digest"]


# Whatever the default: kernels, products and what XLA fuses are captured, were it only one.
CAPTURED = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL "
    "--xla_gpu_graph_min_graph_size=1"
)


def test_case_38_fifty_steps_in_command_buffers_of_cold_kernels(tmp_path):
    """Code is compiled and loaded before the first step alone, though that one is captured too;
    then graphs are replayed. Trained parameters are float64's, with and without graphs."""
    counted = {}
    for kind, flags in (
        ("captured", CAPTURED),
        ("launched", "--xla_gpu_enable_command_buffer="),
    ):
        cache = {"SHARDOPS_CACHE_DIR": str(tmp_path / kind), "XLA_FLAGS": flags}
        out = json.loads(run("", "-m", "tests.gpu.fifty_steps", **cache).splitlines()[-1])
        for name, error in out["errors"].items():
            assert error < 1e-4, (kind, name, error)
            assert out["moved"][name] > 0.1, f"{name} was not trained"
        first, *rest = out["steps"]
        assert first["compiled"] > 0
        for seen in rest:
            assert (seen["compiled"], seen["loaded"]) == (first["compiled"], first["loaded"])
        counted[kind] = np.array([seen["launched"] for seen in out["steps"]])
    assert (counted["launched"] == counted["launched"][0]).all()
    assert counted["launched"][0] >= 10  # forwards, backwards, their sums, four or more products
    assert counted["captured"][-1] == 0, f"launches of each step: {counted['captured']}"
    assert counted["captured"][10:].sum() < counted["launched"][10:].sum() / 2
