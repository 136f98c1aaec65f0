"""`python -m shardops`: commands."""

import argparse
import sys
from collections.abc import Sequence

from shardops.explaining import cli as explaining
from shardops.kernels import cli as kernels
from shardops.kernels import doctor
from shardops.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parsed = parser().parse_args(arguments)
    return parsed.run(parsed)


def parser() -> argparse.ArgumentParser:
    """Parses commands; the result's `run` runs one."""
    parser = argparse.ArgumentParser(prog="python -m shardops")
    parser.add_argument("--version", action="version", version=f"shardops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    explaining.add_to(commands)
    kernels.add_to(commands)
    doctor.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
