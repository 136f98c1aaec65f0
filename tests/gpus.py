"""Marks tests that need GPUs, and skips them with the reason where there are too few."""

import os
import pathlib

import jax
import pytest


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
