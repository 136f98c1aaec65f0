"""`python -m shardops kernels`: build, list, clear."""

import json
import re

import pytest

from shardops import __main__ as command_line
from shardops import errors
from shardops.kernels import compile, table
from shardops.kernels.cache import KernelDirectory

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


@pytest.fixture
def kernels(capsys, caches):
    """Runs `python -m shardops kernels ...`: its exit status, and both its outputs."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = command_line.main(["kernels", *map(str, arguments)])
        except SystemExit as exited:
            status = int(exited.code or 0)
        return status, *capsys.readouterr()

    return run


def test_line_shows_sizes_and_the_constants_that_say_something():
    assert re.fullmatch(r"norm_forward +sm_90 +12,345 +64 +16 +1,024", table.row(ABOUT))
    assert table.constants(ABOUT["constants"]) == "cols=4096 x=bfloat16 layer=1 q=7"
    assert re.search(r"12,345 +\? +\? +\?$", table.row({**ABOUT, "resources": None}))
    columns = table.HEAD.split()
    assert table.constants({"X_TYPE": -9, "COLS": 1}) == "x=-9 cols=1"
    assert columns == ["kernel", "arch", "bytes", "registers", "spilled", "shared"]


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
    caches(cache_dir=tmp_path / "file")
    status, _, err = kernels(action)
    assert status == 2
    assert err.startswith(f"kernels {action}: [Errno 20] Not a directory: '{tmp_path}/file/")


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


@pytest.mark.parametrize(
    "change, text",
    [
        ({"--arch": "hopper"}, "--arch: is 'hopper'; expected an architecture such as sm_90"),
        ({"--arch": ","}, "--arch: is empty; expected architectures such as sm_90,sm_100"),
        ({"--arch": "sm_90,sm_75"}, "--arch: is 'sm_75'; expected sm_80 or newer"),
        ({"--arch": "sm_1"}, "--arch: is 'sm_1'; expected sm_80 or newer"),
        ({"--arch": "sm_90a"}, "--arch: is 'sm_90a'; expected no suffix. Write sm_90"),
        ({"--rows-length": "9" * 20}, "expected at most 2^40 = 1099511627776"),
        ({"--out": ""}, "--out: is empty; expected the path of a directory"),
        ({"--op": "dense"}, r"--op: is 'dense'; expected one of all, rms_norm, layer_norm"),
        ({"--rows-length": "4096,x"}, "--rows-length: is 'x'; expected an integer >= 1"),
        ({"--rows-length": "0"}, "--rows-length: is '0'; expected an integer >= 1"),
        ({"--rows-length": ","}, "--rows-length: is ','; expected integers >= 1"),
        ({"--dtype": "bf16"}, "--dtype: is 'bf16'; expected one of float32, bfloat16, float16"),
        ({"--add": "perhaps"}, "--add: is 'perhaps'; expected one of no, yes"),
        ({"--rows": "-1"}, "--rows: is '-1'; expected an integer >= 1"),
        ({"--beta-dtype": "none"}, "kernels build: --beta-dtype is given for rms_norm; expected "),
    ],
)
def test_arguments_of_build_are_checked(kernels, tmp_path, change, text):
    given = {"--arch": "sm_90", "--op": "rms_norm", "--rows-length": "64", "--out": tmp_path / "p"}
    words = [f"{flag}={value}" for flag, value in {**given, **change}.items()]
    status, out, err = kernels("build", *words)
    assert (status, out) == (2, "")
    assert text in err
    assert not (tmp_path / "p").exists()


def requests(*words: str) -> list[tuple]:
    arguments = ["kernels", "build", "--arch", "sm_90", "--out", "p", *words]
    parsed = command_line.parser().parse_args(arguments)
    found = parsed.requests(parsed)
    return [(r.op, r.length, r.dtype, r.passes, dict(r.options)) for r in found]


def test_lists_of_the_command_line_are_combined():
    both = ("forward", "backward")
    assert requests("--op=rms_norm", "--rows-length=8,16", "--dtype=float16", "--add=no,yes") == [
        ("rms_norm", 8, "float16", both, {"add": "no"}),
        ("rms_norm", 8, "float16", both, {"add": "yes"}),
        ("rms_norm", 16, "float16", both, {"add": "no"}),
        ("rms_norm", 16, "float16", both, {"add": "yes"}),
    ]
    (bare,) = requests("--op=rms_norm", "--rows-length=8", "--dtype=float16", "--add", "--forward")
    assert bare == ("rms_norm", 8, "float16", ("forward",), {"add": "yes"})
    # `all` gives each op the options that it heeds, and all dtypes are the default.
    of_all = requests("--op=all", "--rows-length=8", "--beta-dtype=none", "--backward")
    assert {(op, dtype, *options) for op, _, dtype, _, options in of_all} >= {
        ("rms_norm", "float32"),
        ("layer_norm", "bfloat16", "beta_dtype"),
    }
    assert {passes for *_, passes, _ in of_all} == {("backward",)}


def test_build_fills_a_pack_that_list_shows(kernels, tmp_path):
    try:
        compile.nvrtc_version()
    except errors.KernelUnavailableError as error:
        pytest.skip(f"{error}")
    out = tmp_path / "pack"
    words = ["build", "--arch=sm_80,sm_90", "--op=rms_norm", "--rows-length=64", f"--out={out}"]
    words += ["--dtype=bfloat16", "--forward"]
    status, first, err = kernels(*words)
    assert (status, err) == (0, "")
    lines = first.splitlines()
    assert [line.split()[:2] for line in lines[1:-1:2]] == [
        ["norm_forward", "sm_80"],
        ["norm_forward", "sm_90"],
    ]
    assert lines[2].startswith("    cols=64 vector=8 x=bfloat16 gamma=bfloat16 ")
    assert re.fullmatch(
        rf"{out}: 2 kernels, [\d,]+ bytes; 2 compiled in \d\.\d s, 0 were there", lines[-1]
    )
    assert len(list(out.iterdir())) == 2

    status, again, _ = kernels(*words)
    assert [line.split()[-1] for line in again.splitlines()[1:-1:2]] == ["kept", "kept"]
    assert again.endswith("; 0 compiled in 0.0 s, 2 were there\n")
    assert kernels("list", out)[1].count("norm_forward") == 2


def test_build_without_a_place_or_a_compiler_says_so(kernels, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    words = ["build", "--arch=sm_90", "--op=rms_norm", "--rows-length=64", "--dtype=float32"]

    def without() -> str:
        raise errors.KernelUnavailableError("kernels: no compiler. Install it.")

    monkeypatch.setattr(compile, "nvrtc_version", without)
    status, out, err = kernels(*words, f"--out={tmp_path / 'pack'}")
    assert (status, out, err) == (2, "", "kernels build: kernels: no compiler. Install it.\n")
    (tmp_path / "loose").symlink_to("nowhere")
    for path, of in (("file", ""), ("file/in/it", f" in {tmp_path / 'file'}"), ("loose", "")):
        assert kernels(*words, f"--out={tmp_path / path}") == (
            2,
            "",
            f"kernels build: --out is {tmp_path / path}{of}, which is no directory; expected a "
            "directory, or a path where one can be made. Choose another.\n",
        )


def test_pack_that_cannot_be_written_is_refused_before_a_kernel_is_compiled(kernels, monkeypatch):
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(compile, "check_arch", lambda arch: None)
    words = ["build", "--arch=sm_90", "--op=rms_norm", "--rows-length=64", "--dtype=float32"]
    status, out, err = kernels(*words, "--out=/proc/pack")
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"kernels build: --out is /proc/pack, which cannot be written \(.*\); expected a "
        r"directory, or a path where one can be made\. Choose another\.\n",
        err,
    )


def test_architecture_that_nvrtc_does_not_know_is_refused_before_anything_is_printed(
    kernels, tmp_path
):
    try:
        compile.nvrtc_version()
    except errors.KernelUnavailableError as error:
        pytest.skip(f"{error}")
    words = ["--op=rms_norm", "--rows-length=64", "--dtype=float32", f"--out={tmp_path / 'pack'}"]
    status, out, err = kernels("build", "--arch=sm_90,sm_999", *words)
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"kernels build: kernels: architecture is sm_999, which NVRTC \d+\.\d+ refuses \(.*"
        r"invalid value for --gpu-architecture.*\); expected one that it knows, such as sm_90\. "
        r"Correct it, or upgrade nvidia-cuda-nvrtc if it is older than the GPU\.\n",
        err,
    )
    assert not (tmp_path / "pack").exists()
