"""Meshes of four axes, which take 16 devices: a process of their own."""

import os
import subprocess
import sys

import pytest

from tests.processes import four_axes


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_products_over_four_axes_are_right(kind):
    flags = "--xla_force_host_platform_device_count=16"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.four_axes", kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [float(line) for line in done.stdout.split()] == [0.0] * len(four_axes.CASES)
