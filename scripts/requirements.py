"""Print what extras of pyproject.toml require, one a line: `requirements.py test,dev`.

`pip install -e .[test]` would build the extension again for each new set of extras.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> set[str]:
    extras = PROJECT["optional-dependencies"]
    if extra not in extras:
        sys.exit(
            f"requirements.py: no extra {extra!r} in pyproject.toml; there are {', '.join(extras)}"
        )
    found: set[str] = set()
    for requirement in extras[extra]:
        own = re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", requirement)
        names = own.group(1).split(",") if own else []
        found |= set().union(*map(requirements, names)) if own else {requirement}
    return found


if __name__ == "__main__":
    wanted = set().union(*map(requirements, sys.argv[1].split(",")))
    # With the package's own, so that an extra cannot move them out of their range.
    print("\n".join(sorted(wanted | set(PROJECT["dependencies"]))))
