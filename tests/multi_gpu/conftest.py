"""Tests on real collectives; their outcomes are kept for the record."""

import pathlib

import pytest

from tests import gpus
from tests.multi_gpu import grid

HERE = pathlib.Path(__file__).parent


@pytest.fixture(params=grid.KINDS)
def mesh(request: pytest.FixtureRequest):
    """All GPUs on axes dp and tp, all Auto, then all Explicit."""
    with grid.entered(request.param) as entered:
        yield entered


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(gpus.Outcomes(HERE, several=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus.require(items, HERE, 2)
