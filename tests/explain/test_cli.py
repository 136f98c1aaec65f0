"""python -m shardops explain: one product, without any device."""

import json
import os
import subprocess
import sys

import pytest

from shardops.__main__ import main

DENSE = "b s k, k n -> b s n"
SHAPE = "b=8,s=512,k=4096,n=4096"
ROW = ["--mesh", "dp=2,tp=4", "--lhs", "dp,,tp", "--rhs", "tp,", "--shape", SHAPE]


def run(*arguments):
    # A backend of that name is nowhere: to look for devices would fail.
    return subprocess.run(
        [sys.executable, "-m", "shardops", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "none_such", "PYTHONIOENCODING": "utf-8"},
        encoding="utf-8",
    )


def test_example_of_the_help_runs_without_a_device(tmp_path):
    page = tmp_path / "report.html"
    done = run("explain", DENSE, *ROW, "--out", "dp,tp,", "--html", str(page))
    assert (done.returncode, done.stderr) == (0, "")
    assert "reduce-scatter of out over tp along s: 12.6 MB, 55.2 µs" in done.stdout
    assert "result wanted s@tp, so reduce-scatter." in done.stdout
    assert "plain XLA is not compared" in done.stdout
    assert page.read_text(encoding="utf-8").count("<svg") == 3


def test_bad_input_is_told_on_stderr_and_exits_with_two():
    done = run("explain", DENSE, *ROW, "--out", "dp,xx,")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "explain: --out is 'dp,xx,'; expected axes of the mesh dp, tp. "
        "'xx' on dim s is none of them.\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "b s k, k n", *ROW],
        ["explain", DENSE, *ROW, "--lhs", "dp,,dp"],
        ["explain", DENSE, *ROW, "--rhs", "tp"],
        ["explain", DENSE, *ROW, "--mesh", "dp"],
        ["explain", DENSE, *ROW, "--shape", f"{SHAPE},k=8"],
        ["explain", DENSE, *ROW, "--link", "string"],
        ["explain", DENSE, *ROW, "--dtype", "int3"],
        ["explain", DENSE, *ROW, "--batch-dims", "z"],
        ["explain", DENSE, *ROW, "--html", "/no/such/folder/x.html"],
    ],
)
def test_every_refusal_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("explain: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["explain"], ["explain", DENSE], ["nothing"]])
def test_what_is_no_command_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: python -m shardops" in capsys.readouterr().err


def output(capsys, *arguments):
    assert main(["explain", DENSE, *ROW, *arguments]) == 0
    return capsys.readouterr().out


def test_json_has_the_bytes_of_the_dtype(capsys):
    halves, singles = (
        json.loads(output(capsys, "--json", "--dtype", d)) for d in ("bfloat16", "float32")
    )
    assert halves["bytes"] == 2 * 2 * 4 * 512 * 4096 * 3 / 4
    assert singles["bytes"] == 2 * halves["bytes"]
    assert halves["compiled_bytes"] is None


def test_link_result_and_batch_dims_count(capsys):
    assert "infiniband-ndr: 50 GB/s, 5.0 µs a hop" in output(capsys, "--link", "infiniband-ndr")
    assert "all-reduce of out over tp" in output(capsys)
    assert "reduce-scatter of out over tp along b" in output(capsys, "--out", "cheapest")
    assert "all-reduce" in output(capsys, "--batch-dims", "b,s")


def test_a_transposed_result_is_noted(capsys):
    arguments = ["--mesh", "tp=4", "--shape", "m=8,k=8,n=8", "--rhs", ",tp"]
    assert main(["explain", "m k, k n -> n m", *arguments]) == 0
    assert "note: the product gives m n; its dims are then transposed" in capsys.readouterr().out


def test_axes_of_one_dim_are_joined_by_plus(capsys):
    arguments = ["--mesh", "dp=2,fsdp=2,tp=2", "--shape", "m=8,k=8,n=8", "--lhs", "dp+fsdp,"]
    assert main(["explain", "m k, k n -> m n", *arguments]) == 0
    assert "m 8@dp+fsdp" in capsys.readouterr().out
