"""`python -m shardops`: commands."""

import argparse
import sys
from collections.abc import Sequence

from shardops.explaining import cli
from shardops.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardops")
    parser.add_argument("--version", action="version", version=f"shardops {__version__}")
    cli.add_to(parser.add_subparsers(dest="command", required=True, metavar="command"))
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
