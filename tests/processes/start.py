"""Starts Python programs of this folder, on virtual devices, and never waits for ever."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 300


def start(
    module: str, *arguments: object, devices: int = 8, **environment: str
) -> subprocess.Popen:
    """`python -m tests.processes.<module> <arguments>`, both its outputs in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.processes.{module}", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **environment,
        },
    )


def finish(*processes: subprocess.Popen) -> list[Any]:
    """The JSON in the last line of each. One that fails or hangs ends all, and is shown."""
    end = time.monotonic() + SECONDS
    outputs, wrong = [], False
    for process in processes:
        try:
            # After a failure the others may wait for ever for the one that is gone.
            left = 5.0 if wrong else max(end - time.monotonic(), 1.0)
            output, _ = process.communicate(timeout=left)
            ended = f"returned {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ended = "did not return"
        wrong = wrong or process.returncode != 0
        outputs.append((ended, output))
    shown = "\n".join(f"--- process {n} {e}\n{o[-4000:]}" for n, (e, o) in enumerate(outputs))
    assert not wrong, shown
    return [json.loads(output.splitlines()[-1]) for _, output in outputs]
