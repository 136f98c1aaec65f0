"""A program that was exported and serialised runs in another process, on 1, 2 and 8 devices."""

import pytest

from tests.processes.start import finish, start

pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")


@pytest.mark.parametrize(
    ("route", "devices"),
    [
        ("none", 1),
        ("explicit", 1),
        ("explicit", 2),
        ("explicit", 8),
        ("shard_map", 1),
        ("shard_map", 2),
        ("shard_map", 8),
    ],
)
def test_exported_program_runs_in_another_process(tmp_path, route, devices):
    file = tmp_path / "step.bin"
    finish(start("exporting", "write", route, devices, file, devices=devices))
    finish(start("exporting", "call", route, devices, file, devices=devices))
