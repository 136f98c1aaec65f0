"""Tests on real collectives; their outcomes are kept for the record."""

import pathlib

import pytest

from tests import gpus
from tests.multi_gpu import grid

HERE = pathlib.Path(__file__).parent
_outcomes: dict[str, str] = {}


@pytest.fixture(params=grid.KINDS)
def mesh(request: pytest.FixtureRequest):
    """All GPUs on axes dp and tp, all Auto, then all Explicit."""
    with grid.entered(request.param) as entered:
        yield entered


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus.require(items, HERE, 2)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    gpus.keep_outcomes(session, _outcomes, HERE, several=True)
