"""`python -m shardops kernels`: list and clear."""

import json
import re

import pytest

from shardops.kernels import table
from shardops.kernels.cache import KernelDirectory
from tests.cpp import build

ABOUT = {
    "kernel": "norm_forward",
    "arch": "sm_90",
    "file": "norm_forward.cuh",
    "constants": {
        "COLS": 4096,
        "X_TYPE": 1,
        "BETA_TYPE": 0,
        "HAS_BETA": 0,
        "LAYER": 1,
        "Q_TYPE": 7,
    },
    "code_bytes": 12345,
    "resources": {
        "registers": 64,
        "stack_bytes": 8,
        "spill_store_bytes": 4,
        "spill_load_bytes": 12,
        "shared_bytes": 1024,
    },
    "nvrtc": "13.1",
    "shardops": "0.1.0",
}


def test_line_shows_sizes_and_the_constants_that_say_something():
    assert re.fullmatch(r"norm_forward +sm_90 +12,345 +64 +16 +1,024", table.row(ABOUT))
    assert table.constants(ABOUT["constants"]) == "cols=4096 x=bfloat16 layer=1 q=7"
    assert re.search(r"12,345 +\? +\? +\?$", table.row({**ABOUT, "resources": None}))
    columns = table.HEAD.split()
    assert table.constants({"X_TYPE": -9, "COLS": 1}) == "x=-9 cols=1"
    assert columns == ["kernel", "arch", "bytes", "registers", "spilled", "shared"]


def test_columns_hold_the_name_of_every_kernel():
    sources = [file.read_text() for file in (build.SOURCES / "kernels").glob("*.cuh")]
    found = [re.search(r"__global__[^{;]*?\b([a-z]\w*)\((?!k)", text) for text in sources]
    names = [match[1] for match in found if match]
    assert len(names) > 20
    for name in names:
        words = table.row({**ABOUT, "kernel": name}).split()
        assert words == [name, "sm_90", "12,345", "64", "16", "1,024"]


def test_list_shows_cache_and_pack(kernels, caches, tmp_path):
    cache, pack = tmp_path / "cache" / "kernels", tmp_path / "pack"
    assert kernels("list") == (0, f"cache {cache}: 0 kernels, 0 bytes\n", "")
    KernelDirectory(cache, "").write("1" * 64, b"code", ABOUT)
    KernelDirectory(pack, "").write("2" * 64, b"code", {**ABOUT, "kernel": "norm_finish"})
    caches(kernel_pack=pack)
    (cache / f"{'3' * 64}.kernel").write_bytes(b"damaged")
    (cache / f"{'4' * 64}.kernel").mkdir()
    status, out, err = kernels("list")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert re.fullmatch(rf"pack {pack}: 1 kernel, \d+ bytes", lines[0])
    assert lines[2].split() == ["norm_finish", "sm_90", "12,345", "64", "16", "1,024", "13.1"]
    assert re.fullmatch(rf"cache {cache}: 3 kernels, [\d,]+ bytes", lines[4])
    assert lines[6].split() == ["norm_forward", "sm_90", "12,345", "64", "16", "1,024", "13.1"]
    assert lines[8] == f"{'3' * 64}.kernel: damaged or foreign, ignored (7 bytes)"
    assert lines[9] == f"{'4' * 64}.kernel: damaged or foreign, ignored (a directory)"
    assert len(lines) == 10
    assert kernels("clear")[1].splitlines()[1:] == [f"{'4' * 64}.kernel: a directory, left"]


def test_list_of_a_named_directory_as_json(kernels, tmp_path):
    directory = KernelDirectory(tmp_path / "here", "")
    directory.write("1" * 64, b"code", ABOUT)
    status, out, _ = kernels("list", "--json", directory.path)
    size = (directory.path / f"{'1' * 64}.kernel").stat().st_size
    entry = {"file": f"{'1' * 64}.kernel", "bytes": size, "about": ABOUT}
    assert status == 0
    assert json.loads(out) == [{"directory": str(directory.path), **entry}]


def test_clear_empties_the_cache_and_a_pack_only_when_named(kernels, caches, tmp_path):
    cache = KernelDirectory(tmp_path / "cache" / "kernels", "")
    pack = KernelDirectory(tmp_path / "pack", "")
    for directory in (cache, pack):
        directory.write("1" * 64, b"code", ABOUT)
        directory.write("2" * 64, b"code", ABOUT)
    caches(kernel_pack=pack.path)
    size = sum(entry.size for entry in cache.entries())
    expected = f"cache {cache.path}: removed 2 kernels, {size:,} bytes\n"
    assert kernels("clear") == (0, expected, "")
    assert (cache.entries(), len(pack.entries())) == ([], 2)
    expected = f"directory {pack.path}: removed 2 kernels, {size:,} bytes\n"
    assert kernels("clear", pack.path) == (0, expected, "")
    assert pack.entries() == []


@pytest.mark.parametrize("action", ["list", "clear"])
def test_directory_that_is_none_is_refused(kernels, tmp_path, action):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "absent"):
        status, out, err = kernels(action, path)
        assert (status, out) == (2, "")
        assert err.startswith(f"kernels {action}: {path} is no directory; expected one of kernels.")
    status, out, err = kernels(action, "")
    assert (status, out) == (2, "")
    assert "DIR: is empty; expected the path of a directory" in err


@pytest.mark.parametrize("action", ["list", "clear"])
def test_cache_that_cannot_be_one_is_told(kernels, caches, tmp_path, action):
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "kernels").write_text("")
    for cache, file in (("file", "file"), ("directory", "directory/kernels")):
        caches(cache_dir=tmp_path / cache)
        assert kernels(action) == (
            2,
            "",
            f"kernels {action}: SHARDOPS_CACHE_DIR is {tmp_path / cache}, and {tmp_path / file} "
            "is no directory; expected a directory, or a path where one can be made. Correct it, "
            "or remove that file.\n",
        )


def test_pack_of_the_environment_that_is_none_is_refused_by_list_alone(kernels, caches, tmp_path):
    (tmp_path / "file").write_text("")
    for name, what in (("file", "is no directory"), ("absent", "does not exist")):
        caches(kernel_pack=tmp_path / name)
        assert kernels("list") == (
            2,
            "",
            f"kernels list: SHARDOPS_KERNEL_PACK is {tmp_path / name}, which {what}; expected a "
            "directory of kernels. Correct it, or fill it by `python -m shardops kernels build`.\n",
        )
        assert kernels("clear")[0] == 0
