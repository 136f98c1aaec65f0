"""Tests on real collectives: skipped with the reason where there are fewer than two GPUs.

SHARDOPS_REQUIRE_GPUS=n makes fewer than n GPUs an error instead.
"""

import os
import pathlib

import jax
import pytest

HERE = pathlib.Path(__file__).parent


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
        if len(gpus) < 2:
            reason = f"needs two GPUs; JAX sees {len(gpus)}"
            item.add_marker(pytest.mark.skip(reason=reason))
