"""Tables of launch shapes in a user's cache: damaged or foreign ones are passed over."""

import json
import os
import warnings

import pytest

from shardops.kernels import norm_plan, tuned
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_registers import Geometry
from shardops.kernels.norm_staged import Staged
from shardops.kernels.target import target_for

TARGET = target_for("sm_90", 132)
KEY = "rms.forward 2 4 520"
PROBLEM = NormProblem(64, 520, "rms", "bfloat16", "float32")
BAD = {
    "a list": "[1]",
    "null": "null",
    "a number": "3",
    "no JSON": "{",
    "lists in lists": "[" * 100_000,
    "an entry that is a number": json.dumps({KEY: 3}),
    "no fields": json.dumps({KEY: {}}),
    "an unknown field": json.dumps({KEY: {"threads_per_row": 64, "new_field": 1}}),
    "a field of another type": json.dumps({KEY: {"threads_per_row": 64.0}}),
    "a field that is a list": json.dumps({KEY: {"threads_per_row": [64]}}),
    "7 threads": json.dumps({KEY: {"threads_per_row": 7}}),
    "no threads": json.dumps({KEY: {"threads_per_row": 0}}),
    "more threads than a block has": json.dumps({KEY: {"threads_per_row": 2048}}),
    "whole warps of broken rows": json.dumps({KEY: {"threads_per_row": 24, "rows_per_block": 4}}),
    "a staged shape without rows": json.dumps({KEY: {"threads": 256, "stages": 2}}),
}


@pytest.fixture
def table(caches, tmp_path):
    """Where the table of the user's cache lies."""
    caches(cache_dir=tmp_path)
    tuned._table.cache_clear()
    path = tmp_path / "tuned" / tuned.file_name(TARGET.arch, TARGET.sm_count)
    path.parent.mkdir()
    yield path
    tuned._table.cache_clear()


@pytest.mark.parametrize("key", tuned.read(tuned._SHIPPED / "sm_90-132.json"))
def test_plans_take_what_the_shipped_table_says(key):
    op, x_bytes, gamma_bytes, cols, *few = key.split()
    assert (x_bytes, gamma_bytes) == ("2", "2")
    kind, direction, *add = op.split(".")
    of_x = (4 if few else 128) << 20
    problem = NormProblem(
        of_x // 2 // int(cols),
        int(cols),
        kind,
        "bfloat16",
        "bfloat16",
        "bfloat16" if kind == "layer" else None,
        add=add == ["add"],
    )
    backward = direction == "backward"
    choose = norm_plan.backward_geometry if backward else norm_plan.forward_geometry
    assert choose(problem, TARGET) == tuned.lookup(problem, TARGET, direction)
    assert tuned.lookup(problem, TARGET, direction) == tuned._table("sm_90", 132)[key]


def test_shapes_for_few_rows_are_for_as_little_of_x_at_any_length(table):
    few, many = ({"threads": 128, "threads_per_row": 128, "stages": n} for n in (3, 4))
    keys = {cols: f"rms.backward 2 4 {cols}" for cols in (520, 4104)}
    entries = {
        key + of: shape for key in keys.values() for of, shape in ((" few", few), ("", many))
    }
    table.write_text(json.dumps(entries))
    for cols in keys:
        most = TARGET.sm_count * (64 << 10) // 2 // cols  # rows
        for rows, shape in ((1, few), (most, few), (most + 1, many)):
            problem = NormProblem(rows, cols, "rms", "bfloat16", "float32")
            assert norm_plan.backward_geometry(problem, TARGET) == Staged(**shape)


def test_a_table_of_the_cache_goes_first(table):
    entry = {"threads_per_row": 32, "rows_per_block": 4, "min_blocks": 3}
    table.write_text(json.dumps({KEY: entry}))
    assert norm_plan.forward_geometry(PROBLEM, TARGET) == Geometry(**entry)
    tuned._table.cache_clear()
    entry = {"threads": 128, "threads_per_row": 32, "stages": 4, "store_tiles": True}
    table.write_text(json.dumps({KEY: entry}))
    assert norm_plan.forward_geometry(PROBLEM, TARGET) == Staged(**entry)


@pytest.mark.parametrize(
    "entry",
    [
        {"threads_per_row": 32, "rows_per_block": 2, "min_blocks": 2},
        {"threads_per_row": 1, "rows_per_block": 32},
        {"threads_per_row": 1024, "min_blocks": 10**12},
        {"threads_per_row": 32, "rows_per_block": 4, "turns": 4, "min_blocks": 2},
        {"threads": 128, "threads_per_row": 32, "stages": 2, "cluster": 2},
    ],
    ids=str,
)
def test_shapes_that_no_thread_can_hold_are_passed_over(table, entry):
    """They would compile for minutes."""
    problem = NormProblem(64, 70_000, "rms", "bfloat16", "bfloat16")
    own = norm_plan.forward_geometry(problem, TARGET)
    tuned._table.cache_clear()
    table.write_text(json.dumps({"rms.forward 2 2 70000": entry}))
    assert tuned.lookup(problem, TARGET, "forward") is not None
    assert norm_plan.forward_geometry(problem, TARGET) == own


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_passed_over_with_one_warning(table, name):
    shipped = norm_plan.forward_geometry(PROBLEM, TARGET)
    tuned._table.cache_clear()
    table.write_text(BAD[name])
    with pytest.warns(RuntimeWarning, match=r"sm_90-132\.json cannot be used .* heuristic") as seen:
        assert norm_plan.forward_geometry(PROBLEM, TARGET) == shipped
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert norm_plan.forward_geometry(PROBLEM, TARGET) == shipped


def test_a_pipe_in_the_place_of_a_table_does_not_block(table):
    os.mkfifo(table)
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        norm_plan.forward_geometry(PROBLEM, TARGET)


@pytest.mark.parametrize("threads_per_row", [32, 128])
@pytest.mark.parametrize("stages", [2, 3])
def test_shapes_whose_blocks_could_wait_for_ever_are_passed_over(table, stages, threads_per_row):
    own = norm_plan.forward_geometry(PROBLEM, TARGET)
    entry = {"threads": 128, "threads_per_row": threads_per_row, "store_tiles": True}
    for count in (stages, 4):
        table.write_text(json.dumps({KEY: entry | {"stages": count}}))
        tuned._table.cache_clear()
        found = norm_plan.forward_geometry(PROBLEM, TARGET)
        assert found == (own if count < 4 else Staged(stages=4, **entry))
