"""The parts of the demo that need no training: text, batches, the choice of a mesh, curves."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lm import options, report, text


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(30):
        (tmp_path / f"m{number}.py").write_text(f"value_{number} = {'é' * 3}{number}\n" * 20)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text("skipped\n" * 100)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG" * 100)
    return tmp_path


def names_in(part: np.ndarray) -> set[str]:
    words = bytes(part).decode("ascii").replace("=", " ").split()
    return {word for word in words if word.startswith("value_")}


def test_text_splits_by_file_and_keeps_ascii(corpus: Path) -> None:
    read = text.read(corpus, seq=16)
    train, held_out = names_in(read.train), names_in(read.held_out)
    assert read.files == 30
    assert len(held_out) == 3
    assert len(train) == 27
    assert not train & held_out
    assert max(read.train.max(), read.held_out.max()) < text.VOCABULARY


def test_text_is_the_same_in_another_folder(corpus: Path, tmp_path_factory) -> None:
    moved = tmp_path_factory.mktemp("moved") / "corpus"
    before = text.read(corpus, seq=16)
    corpus.rename(moved)
    assert text.read(moved, seq=16).fingerprint == before.fingerprint
    (moved / "m0.py").write_text("changed\n" * 40)
    assert text.read(moved, seq=16).fingerprint != before.fingerprint


def test_batches_are_a_function_of_seed_and_step(corpus: Path) -> None:
    read = text.read(corpus, seq=16)
    inputs, targets = read.batch(seed=1, step=7, batch=4, seq=16)
    again, _ = read.batch(seed=1, step=7, batch=4, seq=16)
    np.testing.assert_array_equal(inputs, again)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    for seed, step in ((1, 8), (2, 7)):
        other, _ = read.batch(seed=seed, step=step, batch=4, seq=16)
        assert (inputs != other).any()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(1, (1, 1)), (2, (1, 2)), (3, (1, 2)), (4, (1, 4)), (8, (2, 4)), (12, (2, 4)), (16, (4, 4))],
)
def test_mesh_for_takes_most_devices_then_tensor_parallel(
    devices: int, expected: tuple[int, int]
) -> None:
    mesh = options.mesh_for(options.parse([]), devices)
    assert (mesh["dp"], mesh["tp"]) == expected


@pytest.mark.parametrize(
    ("recipe", "capability", "said"),
    [
        ("delayed", "8.9", "products of 8-bit operands"),
        ("current", "12.0", "products of 8-bit operands"),
        ("current", "8.0", "in bfloat16, as this GPU has no such products"),
        ("block128", "9.0", "products of 8-bit operands"),
        ("block128", "10.0", "in float32, as this GPU"),
        ("mxfp8", "9.0", "in bfloat16, as this GPU"),
        ("mxfp8", "10.3", "products of 8-bit operands"),
    ],
)
def test_a_recipe_says_what_this_gpu_does_instead(recipe: str, capability: str, said: str) -> None:
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    assert said in report.arithmetic(recipe, device)


def test_largest_difference_is_relative_and_names_its_place() -> None:
    assert report.largest_difference([2.0, 4.0, 5.0], [2.0, 5.0, 5.5]) == (pytest.approx(0.2), 1)
    difference, at = report.largest_difference([2.0, math.nan], [2.0, 3.0])
    assert (difference, at) == (math.inf, 1)
