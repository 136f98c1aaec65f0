"""Tests that need a GPU: skipped with the reason where there is none; outcomes kept for the record.

SHARDOPS_REQUIRE_GPUS=n makes fewer than n GPUs an error instead.
"""

import os
import pathlib

import jax
import pytest

from tests.gpu import record

HERE = pathlib.Path(__file__).parent
_outcomes: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    # The root conftest chooses the CPU, which is right unless these tests run alone.
    arguments = [pathlib.Path(argument.split("::")[0]).resolve() for argument in config.args]
    if all(path.is_relative_to(HERE) for path in arguments) and _driver_is_there():
        jax.config.update("jax_platforms", "cuda,cpu")
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        # Some tests start programs of their own on the same GPU.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    if not mine:
        return
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    required = int(os.environ.get("SHARDOPS_REQUIRE_GPUS", "0"))
    if len(gpus) < required:
        raise pytest.UsageError(
            f"SHARDOPS_REQUIRE_GPUS is {required}, but JAX sees {len(gpus)} GPUs: {jax.devices()}"
        )
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if not gpus:
            reason = f"no CUDA device: JAX runs on {jax.devices()[0].platform}"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcomes = {name: outcome for name, outcome in _outcomes.items() if "tests/gpu/" in name}
    if hasattr(session.config, "workerinput") or "passed" not in outcomes.values():
        return
    narrowed = session.config.getoption("keyword") or session.config.getoption("markexpr")
    whole = not narrowed and all(
        pathlib.Path(argument).resolve() == HERE for argument in session.config.args
    )
    record.keep_outcomes(outcomes, whole=whole)


def _driver_is_there() -> bool:
    return pathlib.Path("/dev/nvidiactl").exists() or pathlib.Path("/proc/driver/nvidia").exists()
