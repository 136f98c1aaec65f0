"""SHARDOPS_AUTOTUNE=1 on the stand-in cuBLASLt, whose algorithms take as long as a test says."""

import json
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed

from shardops.kernels import autotune, gemm_scaled
from shardops.kernels.gemm_scaled_plan import Native, Side, scaled_plan
from tests.kernels.contractions import Contraction
from tests.kernels.gemm_calls import Call

SIZES = {"m": 5, "k": 9, "n": 8}
WORKSPACE = 1 << 16  # of algorithm 1; algorithm 2, the heuristic's first, takes twice that


@pytest.fixture
def tuning(core: ModuleType, caches: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Algorithm 1 is the fastest of 0, 1 and 2. Returns the cache's directory of algorithms."""
    caches(autotune=True)
    autotune.clear_memory()
    monkeypatch.setenv("FAKE_CUBLASLT_MICROSECONDS", "30,10,20")
    return tmp_path / "cache" / "gemm"


def call(rng: np.random.Generator, **fields: Any) -> Call:
    return Call(
        rng, Contraction("mk,kn"), {**SIZES, **fields.pop("sizes", {})}, "float32", **fields
    )


def workspace_of(text: str) -> int:
    [number] = {int(part.split(" ")[0]) for part in text.split("workspace_bytes = ")[1:]}
    return number


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def test_the_fastest_algorithm_is_taken_and_right(tuning: Path, rng: np.random.Generator) -> None:
    one = call(rng)
    assert workspace_of(one.text()) == WORKSPACE
    one.check()
    assert len(entries(tuning)) == 1


def test_a_hundredth_is_no_gain(
    tuning: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUBLASLT_MICROSECONDS", "20,19.9,20")
    assert workspace_of(call(rng).text()) == 2 * WORKSPACE


@pytest.mark.parametrize("forgetting", [False, True], ids=["memory", "disk"])
def test_what_was_timed_is_remembered(
    tuning: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, forgetting: bool
) -> None:
    call(rng).text()
    monkeypatch.setenv("FAKE_CUBLASLT_MICROSECONDS", "1,10,20")
    if forgetting:
        autotune.clear_memory()
    else:
        entries(tuning)[0].unlink()
    assert workspace_of(call(rng).text()) == WORKSPACE


def test_each_problem_is_timed_by_itself(tuning: Path, rng: np.random.Generator) -> None:
    for count, fields in enumerate(
        (
            {},
            {"sizes": {"n": 16}},
            {"epilogue": "bias", "bias": "float32"},
            {"add": "float32"},
            {"precision": jax.lax.Precision.DEFAULT},
        )
    ):
        call(rng, **fields).text()
        assert len(entries(tuning)) == count + 1


def test_another_library_or_device_is_timed_anew(
    tuning: Path, rng: np.random.Generator, core: ModuleType
) -> None:
    def tuned(version: int, name: str) -> None:
        class Other:
            gemm_query = staticmethod(core.gemm_query)
            versions = staticmethod(lambda: {"cublaslt": version})
            device_name = staticmethod(lambda device: name)

        attributes = {"m": 5, "n": 8, "k": 9, "type": 0, "out_type": 0}
        assert autotune.tuned(Other, 0, attributes, 1 << 20) is not None

    for count, (version, name) in enumerate(((1, "A"), (2, "A"), (2, "B"), (1, "A"))):
        tuned(version, name)
        assert len(entries(tuning)) == min(count + 1, 3)


def test_products_of_8_bit_operands_too(tuning: Path) -> None:
    side = Side((32, 64), "float8_e4m3fn", "tensor")
    plan = scaled_plan(side, side, ((1,), (1,)), ((), ()), "sm_90")
    assert isinstance(plan.native, Native)

    def product(x: Any, w: Any, scale: Any) -> Any:
        after = {"epilogue": "none", "out_dtype": "bfloat16", "precise": False}
        return gemm_scaled.native_gemm(plan.native, (x, scale), (w, scale), None, None, **after)

    data = jnp.ones((32, 64), jnp.float8_e4m3fn)
    text = jax.jit(product).lower(data, data, jnp.float32(1)).as_text()
    assert workspace_of(text) == WORKSPACE
    [entry] = entries(tuning)
    asked = json.loads(entry.read_text())["problem"]["attributes"]
    assert asked["scale_a"] == asked["scale_b"] == asked["fast_accum"] == 1


def damage(entry: dict[str, Any], how: str) -> str:
    changed = {
        "of another algorithm": {"algo": entry["algo"][2:] + "00"},
        "with more workspace": {"workspace_bytes": 1 << 40},
        "of another problem": {"problem": {}},
        "of another format": {"format": "else"},
    }
    if how in changed:
        return json.dumps({**entry, **changed[how]})
    return {"cut": json.dumps(entry)[:-9], "empty": "", "a list": "[]"}[how]


@pytest.mark.parametrize(
    "how",
    [
        "of another algorithm",
        "with more workspace",
        "of another problem",
        "of another format",
        "cut",
        "empty",
        "a list",
    ],
)
def test_a_damaged_entry_is_one_warning(tuning: Path, rng: np.random.Generator, how: str) -> None:
    one = call(rng)
    one.text()
    [path] = entries(tuning)
    path.write_text(damage(json.loads(path.read_text()), how))
    autotune.clear_memory()
    with pytest.warns(RuntimeWarning, match="is damaged or foreign") as warned:
        assert workspace_of(call(rng).text()) == WORKSPACE
    assert len(warned) == 1
    autotune.clear_memory()  # the entry is whole again
    assert workspace_of(call(rng).text()) == WORKSPACE


def test_a_directory_that_cannot_be_written_is_one_warning(
    tuning: Path, rng: np.random.Generator
) -> None:
    tuning.parent.mkdir(exist_ok=True)
    tuning.write_text("a file in its place")
    calls = [call(rng), call(rng, sizes={"n": 16})]
    with pytest.warns(RuntimeWarning, match="cannot be") as warned:
        found = [workspace_of(one.text()) for one in calls]
    assert found == [WORKSPACE, WORKSPACE]
    assert len(warned) == 2  # it can be neither read nor written


def test_without_memory_the_heuristic_chooses(
    tuning: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FREE_BYTES", "1000")
    with pytest.warns(RuntimeWarning, match=r"timing takes \d+ bytes; expected at most half"):
        assert workspace_of(call(rng).text()) == 2 * WORKSPACE
    assert entries(tuning) == []
    monkeypatch.delenv("FAKE_CUDA_FREE_BYTES")
    assert workspace_of(call(rng).text()) == WORKSPACE


def test_without_an_algorithm(
    tuning: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUBLASLT_REFUSES", "all")
    call(rng).check()
    assert entries(tuning) == []


class Store:
    """What processes share: the first to set a name is heard."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def key_value_set(self, name: str, text: str, allow_overwrite: bool) -> None:
        if name in self.kept and not allow_overwrite:
            raise RuntimeError(f"ALREADY_EXISTS: {name}")
        self.kept[name] = text

    def blocking_key_value_get(self, name: str, milliseconds: int) -> str:
        return self.kept[name]


def test_several_processes_take_what_one_has_on_disk(
    tuning: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(rng).text()
    [timed] = entries(tuning)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    autotune.clear_memory()
    assert workspace_of(call(rng).text()) == 2 * WORKSPACE  # they share nothing
    store = Store()
    monkeypatch.setattr(distributed.global_state, "client", store)
    autotune.clear_memory()
    assert workspace_of(call(rng).text()) == WORKSPACE
    timed.unlink()
    autotune.clear_memory()  # a process without that file
    assert workspace_of(call(rng).text()) == WORKSPACE
    other = call(rng, sizes={"n": 16})
    assert workspace_of(other.text()) == 2 * WORKSPACE
    assert entries(tuning) == []


def test_a_store_that_is_gone_is_an_error(
    tuning: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this process would lower another program than those that it still answers."""

    class Gone(Store):
        def key_value_set(self, name: str, text: str, allow_overwrite: bool) -> None:
            raise RuntimeError("UNAVAILABLE: the coordinator")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed.global_state, "client", Gone())
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        call(rng).text()


def test_threads_time_one_problem_once(
    tuning: Path, rng: np.random.Generator, core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    class Counting:
        versions = staticmethod(core.versions)
        device_name = staticmethod(core.device_name)

        @staticmethod
        def gemm_query(**arguments: Any) -> Any:
            timed.append(arguments)
            return core.gemm_query(**arguments)

    attributes = {"m": 5, "n": 8, "k": 9, "type": 0, "out_type": 0}
    found: list[Any] = []
    work = lambda: found.append(autotune.tuned(Counting, 0, attributes, 1 << 20))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(8)]
    with warnings.catch_warnings():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8
    assert all(f == found[0] for f in found)
    assert len(timed) == 1


def test_off_by_default(core: ModuleType, caches: Any, rng: np.random.Generator) -> None:
    caches(autotune=False)
    assert workspace_of(call(rng).text()) == 2 * WORKSPACE
