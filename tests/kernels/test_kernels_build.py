"""`python -m shardops kernels build`."""

import itertools
import re

import pytest

from shardops import __main__ as command_line
from shardops import errors
from shardops.kernels import compile, packing
from shardops.kernels.families import DTYPES, Request


@pytest.mark.parametrize(
    "change, text",
    [
        ({"--arch": "hopper"}, "--arch: is 'hopper'; expected an architecture such as sm_90"),
        ({"--arch": ","}, "--arch: is empty; expected architectures such as sm_90,sm_100"),
        ({"--arch": "sm_90,sm_75"}, "--arch: is 'sm_75'; expected sm_80 or newer"),
        ({"--arch": "sm_1"}, "--arch: is 'sm_1'; expected sm_80 or newer"),
        ({"--arch": "sm_90a"}, "--arch: is 'sm_90a'; expected no suffix. Write sm_90"),
        ({"--rows-length": "9" * 20}, "expected at most 2^40 = 1099511627776"),
        ({"--rows-length": "9" * 5000}, "expected at most 2^40 = 1099511627776"),
        ({"--arch": "sm_" + "9" * 5000}, "expected an architecture such as sm_90"),
        ({"--arch": "sm_９０"}, "--arch: is 'sm_９０'; expected an architecture such as sm_90"),
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


@pytest.mark.usefixtures("nvrtc")
def test_build_fills_a_pack_that_list_shows(kernels, tmp_path):
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


@pytest.mark.usefixtures("nvrtc")
def test_build_says_what_serves_requests_without_kernels(kernels, tmp_path):
    out = tmp_path / "pack"
    words = ["build", "--arch=sm_80,sm_90", "--op=gemm", f"--out={out}", "--dtype=bfloat16,float32"]
    served = "cuBLASLt makes these products. Kernels are there for contractions of at most 256 "
    status, printed, err = kernels(*words, "--rows-length=512,1000")
    assert (status, printed, out.exists()) == (2, "", False)
    assert err.startswith(
        "kernels build: there is nothing to build.\n"
        f"gemm, sm_80: no kernel for 512, 1000 in bfloat16; 512, 1000 in float32: {served}"
    )
    assert "\ngemm, sm_90: no kernel for 512, 1000 in bfloat16; 512, 1000 in float32: " in err

    status, printed, err = kernels(*words, "--rows-length=512,64")
    assert (status, err) == (0, "")
    kernel_lines = [line.split()[:2] for line in printed.splitlines()[1:-3:2]]
    assert kernel_lines == [["gemm_flat", "sm_90"], ["gemm_small", "sm_90"]]
    lines = printed.splitlines()[-3:]
    assert lines[0].startswith("gemm, sm_80: no kernel for 512, 64 in bfloat16; 512, 64 in float32")
    assert lines[1].startswith("gemm, sm_90: no kernel for 512 in bfloat16; 512, 64 in float32: ")


def test_products_have_kernels_where_the_command_line_says_so():
    """At most 256 elements that are a multiple of 8, of 16 bits, on sm_90."""
    lengths = [1, 7, 8, 12, 64, 72, 100, 248, 256, 264, 4096]
    for arch, dtype, n in itertools.product(("sm_80", "sm_90", "sm_100"), DTYPES, lengths):
        kernels = packing.kernels_of(Request("gemm", n, dtype), arch, 1, 132)
        some = arch == "sm_90" and dtype != "float32" and n <= 256 and n % 8 == 0
        assert bool(kernels) == some, (arch, dtype, n)


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


@pytest.mark.usefixtures("nvrtc")
def test_architecture_that_nvrtc_does_not_know_is_refused_before_anything_is_printed(
    kernels, tmp_path
):
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
