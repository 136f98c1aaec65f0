"""The README's example, run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from .conftest import ROOT, user_environment


def test_readme_example_prints_what_it_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    [expected] = re.findall(r"^```text\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=user_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected
