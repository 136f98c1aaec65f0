"""Tests that need GPUs: skipped, with the reason, where there are too few; outcomes are kept."""

import os
import pathlib

import jax
import pytest

from tests.gpu import record


def require(items: list[pytest.Item], folder: pathlib.Path, least: int) -> None:
    """The tests of `folder` need `least` GPUs.

    SHARDOPS_REQUIRE_GPUS=n makes fewer than n GPUs an error instead.
    """
    mine = [item for item in items if item.path.is_relative_to(folder)]
    if not mine:
        return
    count = sum(device.platform == "gpu" for device in jax.devices())
    required = int(os.environ.get("SHARDOPS_REQUIRE_GPUS", "0"))
    if count < required:
        raise pytest.UsageError(
            f"SHARDOPS_REQUIRE_GPUS is {required}, but JAX sees {count} GPUs: {jax.devices()}"
        )
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if count < least:
            reason = f"needs {least} CUDA devices; JAX sees {count}"
            item.add_marker(pytest.mark.skip(reason=reason))


def keep_outcomes(
    session: pytest.Session, outcomes: dict[str, str], folder: pathlib.Path, *, several: bool
) -> None:
    """Writes down, for the record, how the tests of `folder` came out."""
    mine = {name: got for name, got in outcomes.items() if f"tests/{folder.name}/" in name}
    if hasattr(session.config, "workerinput") or "passed" not in mine.values():
        return
    narrowed = session.config.getoption("keyword") or session.config.getoption("markexpr")
    ended = session.exitstatus != pytest.ExitCode.INTERRUPTED
    whole = (
        ended
        and not narrowed
        and all(pathlib.Path(argument).resolve() == folder for argument in session.config.args)
    )
    record.keep_outcomes(mine, whole=whole, several=several)
