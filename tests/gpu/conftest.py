"""Tests that need a GPU; their outcomes are kept for the record."""

import os
import pathlib

import jax
import pytest

from tests import gpus

HERE = pathlib.Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(gpus.Outcomes(HERE, several=False))
    # The root conftest chooses the CPU, which is right unless these tests run alone.
    arguments = [pathlib.Path(argument.split("::")[0]).resolve() for argument in config.args]
    if all(path.is_relative_to(HERE) for path in arguments) and _driver_is_there():
        jax.config.update("jax_platforms", "cuda,cpu")
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        # Some tests start programs of their own on the same GPU.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus.require(items, HERE, 1)


def _driver_is_there() -> bool:
    return pathlib.Path("/dev/nvidiactl").exists() or pathlib.Path("/proc/driver/nvidia").exists()
