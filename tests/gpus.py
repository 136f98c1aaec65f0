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


class Outcomes:
    """A plugin of pytest that writes down, for the record, how the tests of `folder` came out."""

    def __init__(self, folder: pathlib.Path, *, several: bool):
        self._folder, self._several = folder, several
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        mine = f"tests/{self._folder.name}/" in report.nodeid
        if mine and (report.when == "call" or report.outcome != "passed"):
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        if hasattr(config, "workerinput") or "passed" not in self._outcomes.values():
            return
        narrowed = config.getoption("keyword") or config.getoption("markexpr")
        ended = session.exitstatus != pytest.ExitCode.INTERRUPTED
        whole = (
            ended
            and not narrowed
            and all(pathlib.Path(argument).resolve() == self._folder for argument in config.args)
        )
        record.keep_outcomes(self._outcomes, whole=whole, several=self._several)
