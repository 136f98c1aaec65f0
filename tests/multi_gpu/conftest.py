"""Tests on real collectives."""

import pathlib

import pytest

from tests import gpus


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus.require(items, pathlib.Path(__file__).parent, 2)
