"""The demo under recipes and in bfloat16: beside plain jnp, and its state through a checkpoint."""

import re
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from .conftest import Run
from .test_train_lm import checkpoint, table

SMALL = ("--dim", 32, "--heads", 4, "--layers", 1, "--seq", 32, "--batch", 8, "--mesh", "dp=2,tp=2")
STEPS = 4


@pytest.fixture(scope="module")
def delayed(train_lm: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and folder of an uninterrupted run with state."""
    out = tmp_path_factory.mktemp("delayed")
    return trained(train_lm, out, "--recipe", "delayed"), out


def trained(train_lm: Run, out: Path, *arguments: object) -> str:
    result = train_lm(*SMALL, "--steps", STEPS, "--out", out, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_near_plain(output: str) -> None:
    held_out = re.search(
        r"held-out loss (\S+), of plain float32 jnp on one device (\S+): (\S+)% apart \(allowed 2%",
        output,
    )
    assert held_out
    ours, plain, apart = map(float, held_out.groups())
    assert apart < 1  # not yet far from how both began
    assert ours != plain
    assert ours < 4.852  # ln(128), what knowing nothing costs


@pytest.mark.parametrize("recipe", ["current", "block128", "mxfp8"])
def test_train_lm_stays_near_plain_jnp(train_lm: Run, tmp_path: Path, recipe: str) -> None:
    output = trained(train_lm, tmp_path, "--recipe", recipe)
    assert f"recipe {recipe}: 8-bit operands, multiplied in float32, as this CPU" in output
    assert_near_plain(output)


def test_train_lm_in_bfloat16_stays_near_plain_jnp(train_lm: Run, tmp_path: Path) -> None:
    output = trained(train_lm, tmp_path, "--dtype", "bfloat16")
    assert "mesh dp=2,tp=2, bfloat16\n" in output
    assert_near_plain(output)
    arrays, _ = checkpoint(tmp_path, STEPS)
    assert {array.dtype.name for array in arrays} == {"float32", "int32"}


def test_train_lm_rolls_delayed_state_once_a_step(delayed: tuple[str, Path]) -> None:
    output, out = delayed
    assert_near_plain(output)
    # The maxima of a tensor are found along with its quantisation, over all that share it.
    asked = {row[1] for row in table(output, "Collectives of one training step")}
    assert any("shardops.quantize" in op for op in asked)
    state = ocp.StandardCheckpointer().restore(out / "checkpoint" / str(STEPS) / "state")
    mlp = state["quantizers"]["layers"]["0"]["mlp"]
    for product in ("up", "down"):
        for role in ("input", "kernel", "gradient"):
            quantizer = mlp[product]["quantizers"][role]
            history = np.asarray(quantizer["amax_history"])
            assert (history[:STEPS] > 0).all()
            assert (history[STEPS:] == 0).all()
            largest = 57344 if role == "gradient" else 448
            np.testing.assert_allclose(quantizer["scale_inv"], history.max() / largest, rtol=1e-6)


def test_train_lm_resumes_delayed_state_bit_for_bit(
    train_lm: Run, delayed: tuple[str, Path], tmp_path: Path
) -> None:
    recipe = ("--recipe", "delayed", "--no-check")
    trained(train_lm, tmp_path, *recipe, "--steps", 2)
    trained(train_lm, tmp_path, *recipe, "--resume")
    arrays, losses = checkpoint(tmp_path, STEPS)
    expected_arrays, expected_losses = checkpoint(delayed[1], STEPS)
    assert losses == expected_losses
    assert len(arrays) == len(expected_arrays)
    for array, expected in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_array_equal(array, expected)
