"""One cache directory, many processes: cold together, then warm, on good and on bad disks.

Reported case 34 among them: cold processes together, directories of mode 0555, truncated entries.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from shardops import errors
from shardops.kernels import compile
from shardops.kernels.cache import KernelDirectory
from tests.kernels.take_kernels import KERNELS

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

ROOT = pathlib.Path(__file__).parents[2]
COLD = 16


def taken(*environments: dict[str, str | None]) -> list[dict]:
    """What processes with these environments saw that started together."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.take_kernels", json.dumps(environments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for seen in found:
        assert "error" not in seen, seen["error"]
    return found


def test_sixteen_cold_processes_leave_one_entry_a_kernel_and_the_next_compiles_nothing(tmp_path):
    here: dict[str, str | None] = {"SHARDOPS_CACHE_DIR": str(tmp_path)}
    cold = taken(*[here] * COLD)
    for seen in cold:
        assert seen["digests"] == cold[0]["digests"], "all run the same machine code"
        assert seen["counts"]["compiled"] + seen["counts"]["disk"] == len(KERNELS)
        assert seen["warnings"] == []
    assert sum(seen["counts"]["compiled"] for seen in cold) >= len(KERNELS)

    # One whole entry a kernel, and no temporary file.
    assert list(tmp_path.iterdir()) == [tmp_path / "kernels"]
    entries = KernelDirectory(tmp_path / "kernels", "").entries()
    assert sorted((tmp_path / "kernels").iterdir()) == [entry.path for entry in entries]
    whole = [entry.about for entry in entries if entry.about is not None]
    names = sorted(about["kernel"] for about in whole)
    assert names == sorted(kernel.name for kernel in KERNELS)

    (warm,) = taken(here)
    assert warm["counts"] == {"memory": 0, "pack": 0, "disk": len(KERNELS), "compiled": 0}
    assert (warm["digests"], warm["warnings"]) == (cold[0]["digests"], [])
    # A warm start needs no compiler, nor the time to load one, where a wheel tells its version.
    assert warm["loaded"] == compile.compiler().startswith("nvrtc ")
    print("from disk:", *(f"{milliseconds:.2f} ms" for milliseconds in warm["times"]))
    assert warm["times"][-1] < 20  # 0.2 alone; other processes run too


@pytest.mark.parametrize("filled", [False, True])
def test_case_34_eight_processes_on_a_directory_of_mode_0555(tmp_path, filled):
    """Kernels stay in memory, at the cost of one warning each; what is there serves."""
    here: dict[str, str | None] = {"SHARDOPS_CACHE_DIR": str(tmp_path)}
    kernels = tmp_path / "kernels"
    (alone,) = taken(here if filled else {"SHARDOPS_CACHE_DIR": str(tmp_path / "other")})
    kernels.mkdir(exist_ok=True)
    before = {path: path.read_bytes() for path in kernels.iterdir()}
    assert len(before) == len(KERNELS) * filled
    kernels.chmod(0o555)
    try:
        found = taken(*[here] * 8)
    finally:
        kernels.chmod(0o755)
    for seen in found:
        assert seen["digests"] == alone["digests"]
        assert seen["counts"]["disk" if filled else "compiled"] == len(KERNELS)
        assert len(seen["warnings"]) == (not filled)
        assert all("cannot be written" in text for text in seen["warnings"])
    assert {path: path.read_bytes() for path in kernels.iterdir()} == before


def test_case_34_truncated_entries_are_mended_by_eight_processes(tmp_path):
    here: dict[str, str | None] = {"SHARDOPS_CACHE_DIR": str(tmp_path)}
    (cold,) = taken(here)
    whole = {path: path.read_bytes() for path in (tmp_path / "kernels").iterdir()}
    for path, data in whole.items():
        path.write_bytes(data[: len(data) // 2])  # in the middle of its machine code
    found = taken(*[here] * 8)
    for seen in found:
        assert seen["digests"] == cold["digests"]
        assert seen["counts"]["compiled"] + seen["counts"]["disk"] == len(KERNELS)
        # Whoever comes late finds an entry that another has mended.
        assert len(seen["warnings"]) <= 1
        assert all("damaged" in text for text in seen["warnings"])
    assert sum(len(seen["warnings"]) for seen in found) >= 1
    assert {path: path.read_bytes() for path in (tmp_path / "kernels").iterdir()} == whole


def test_homes_and_caches_that_cannot_be_cost_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    unset = {"SHARDOPS_CACHE_DIR": None, "XDG_CACHE_HOME": None}
    good: dict[str, dict[str, str | None]] = {
        "home": {**unset, "HOME": str(tmp_path / "home")},
        "base": {**unset, "XDG_CACHE_HOME": str(tmp_path / "base")},
    }
    bad: dict[str, dict[str, str | None]] = {
        "home is a file": {**unset, "HOME": str(tmp_path / "file")},
        "home is /dev/null": {**unset, "HOME": "/dev/null"},
        "cache is a file": {"SHARDOPS_CACHE_DIR": str(tmp_path / "file")},
        "cache is in /proc": {"SHARDOPS_CACHE_DIR": "/proc/shardops"},
        "name is too long": {"SHARDOPS_CACHE_DIR": "x" * 5000},
    }
    found = taken(*good.values(), *bad.values())
    for name, seen in zip((*good, *bad), found, strict=True):
        assert seen["digests"] == found[0]["digests"], name
        assert seen["counts"]["compiled"] == len(KERNELS), name
        assert len(seen["warnings"]) == (name in bad), (name, seen["warnings"])
        assert all("SHARDOPS_CACHE_DIR" in text for text in seen["warnings"])
    for directory in ("home/.cache/shardops/kernels", "base/shardops/kernels"):
        assert len(list((tmp_path / directory).iterdir())) == len(KERNELS)
    assert (tmp_path / "file").read_text() == ""


def test_absent_home_is_one_of_the_users_own(monkeypatch, tmp_path):
    """As in a container that runs as a number without a name."""
    monkeypatch.delenv("SHARDOPS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compile.config.get.cache_clear()
    try:
        path = compile.cache_directory(compile.config.get()).path
    finally:
        compile.config.get.cache_clear()
    assert path == tmp_path / f"shardops-{os.getuid()}" / "kernels"
