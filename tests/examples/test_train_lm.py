"""The demo from end to end on a small model: what it prints, writes, and continues from."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from .conftest import ROOT, Run, user_environment

SMALL = ("--dim", 32, "--heads", 4, "--layers", 1, "--seq", 32, "--batch", 8)
STEPS = 6


@pytest.fixture(scope="module")
def whole(train_lm: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and folder of an uninterrupted run, compared with plain jnp."""
    out = tmp_path_factory.mktemp("whole")
    result = train_lm(*SMALL, "--steps", STEPS, "--out", out)
    assert result.returncode == 0, result.stderr
    return result.stdout, out


def checkpoint(out: Path, step: int) -> tuple[list[np.ndarray], list[float]]:
    folder = out / "checkpoint" / str(step)
    state = ocp.StandardCheckpointer().restore(folder / "state")
    record = json.loads((folder / "record" / "metadata").read_text())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)], record["losses"]


def table(output: str, title: str) -> list[list[str]]:
    """The rows of one printed table."""
    lines = output.split(title)[1].split("┡")[1].split("└")[0].splitlines()
    rows = [line.strip("│ ").split("│") for line in lines if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_train_lm_prints_mesh_losses_and_agreement(whole: tuple[str, Path]) -> None:
    output, _ = whole
    assert "mesh dp=2,tp=4" in output
    losses = {row[0]: float(row[1]) for row in table(output, "After training")}
    assert losses.keys() == {"train", "held out"}
    # Fewer than ln(128), what knowing nothing costs, and no less than a trained model could.
    assert all(1 < loss < 4.852 for loss in losses.values())
    difference = re.search(r"plain jnp on one device: (\S+), at step", output)
    assert difference
    assert float(difference[1]) < 1e-4


def test_train_lm_lists_the_collectives_of_a_step(whole: tuple[str, Path]) -> None:
    rows = table(whole[0], "Collectives of one training step")
    found = {(kind, op): (int(count), int(size.replace(",", ""))) for kind, op, count, size in rows}
    stream = 8 // 2 * 32 * 32 * 4  # [batch / dp, seq, dim] float32: gathered over the sequence
    # Into attention and MLP the normed stream is gathered, out of the MLP it is scattered. The
    # projection's weight is so small here that it is gathered instead, and the heads move.
    assert found["all-gather", "shardops.gemm"] == (3, 2 * stream + 32 * 32 * 4)
    assert found["all-to-all", "shardops.gemm"] == (1, stream // 4)
    assert found["reduce-scatter", "shardops.gemm"] == (1, stream // 4)


def test_train_lm_writes_a_picture_and_a_checkpoint(whole: tuple[str, Path]) -> None:
    _, out = whole
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [path.name for path in (out / "checkpoint").iterdir()] == [str(STEPS)]
    arrays, losses = checkpoint(out, STEPS)
    assert len(losses) == STEPS
    assert all(np.isfinite(array).all() for array in arrays)


def test_train_lm_resumes_bit_for_bit(
    train_lm: Run, whole: tuple[str, Path], tmp_path: Path
) -> None:
    for steps, resume in ((2, ()), (STEPS, ("--resume",))):
        result = train_lm(*SMALL, "--no-check", "--steps", steps, "--out", tmp_path, *resume)
        assert result.returncode == 0, result.stderr
    arrays, losses = checkpoint(tmp_path, STEPS)
    expected_arrays, expected_losses = checkpoint(whole[1], STEPS)
    assert losses == expected_losses
    assert len(arrays) == len(expected_arrays)
    for array, expected in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_train_lm_resumes_on_one_device_and_compares_from_there(
    train_lm: Run, whole: tuple[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").symlink_to(whole[1] / "checkpoint")
    result = train_lm(
        *SMALL, "--steps", STEPS + 2, "--out", tmp_path, "--resume", "--mesh", "dp=1,tp=1"
    )
    assert result.returncode == 0, result.stderr
    assert table(result.stdout, "Collectives of one training step") == [["none", "", "0", "0"]]
    assert re.search(rf"on one device: \S+, at step ({STEPS + 1}|{STEPS + 2}) ", result.stdout)


def test_train_lm_learns(train_lm: Run, tmp_path: Path) -> None:
    sizes = ("--dim", 64, "--layers", 1, "--seq", 64, "--batch", 16, "--steps", 60)
    result = train_lm(*sizes, "--no-check", "--mesh", "dp=2,tp=2", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    held_out = float(table(result.stdout, "After training")[1][1])
    # Character frequencies alone cost about 3.3 nats in Python source.
    assert held_out < 3.2


@pytest.mark.parametrize(
    ("recipe", "allowed", "said"),
    [
        ("none", "ALLOWED_ALONG_CURVE", "the loss curve"),
        ("current", "ALLOWED_HELD_OUT", "the loss on held-out text"),
    ],
)
def test_train_lm_fails_where_it_leaves_plain_jnp(
    tmp_path: Path, recipe: str, allowed: str, said: str
) -> None:
    program = (
        f"import sys, train_lm; train_lm.{allowed} = -1.0; sys.exit(train_lm.main(sys.argv[1:]))"
    )
    arguments = [*map(str, SMALL), "--steps", "1", "--mesh", "dp=1,tp=1", "--out", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--recipe", recipe],
        env=user_environment(),
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert result.stderr == f"train_lm.py: {said} left that of plain jnp\n"
