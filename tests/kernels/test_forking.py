"""A process that forks while it compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("forked.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_child_of_a_fork_compiles_and_waits_for_no_thread(tmp_path: Path) -> None:
    environment = {**os.environ, "SHARDOPS_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "both in the child",
        "one more in the parent",
        "and one beside threads that never rest",
    ]
