"""Runs programs of their own on the GPU: what a process does first, only a new one can show."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def run(script: str, *arguments: str, **environment: str | None) -> str:
    """Returns what it printed. A variable of None is unset."""
    done = subprocess.run(
        [sys.executable, *(["-c", script] if script else []), *arguments],
        cwd=ROOT,
        env=_environment({"PYTHONPATH": _python_path(), **environment}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _environment(changes: dict[str, str | None]) -> dict[str, str]:
    whole = {**os.environ, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def _python_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)
