"""Runs of `examples/train_lm.py` in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def user_environment(**changes: str) -> dict[str, str]:
    """The environment of a user on a CPU: without the flags of this test session."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "COLUMNS": "120"} | changes


@pytest.fixture(scope="session")
def train_lm() -> Run:
    def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), *map(str, arguments)]
        env = user_environment(**environment)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    return run
