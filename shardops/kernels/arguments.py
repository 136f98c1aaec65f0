"""Readers of command-line arguments of `python -m shardops kernels` and `doctor`."""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardops.errors import shown

MOST = 2**40  # elements of a row, or rows: more than any GPU's memory holds


def path(text: str) -> Path:
    if not text:  # of an unset variable, and Path("") is the working directory
        raise argparse.ArgumentTypeError("is empty; expected the path of a directory")
    return Path(text)


def some(allowed: Sequence[str]) -> Any:
    """Reads a list of words that are separated by commas."""

    def words(text: str) -> tuple[str, ...]:
        found = tuple(word for word in text.replace(",", " ").split())
        for word in found:
            if word not in allowed:
                raise argparse.ArgumentTypeError(
                    f"is {shown(word)}; expected one of {', '.join(allowed)}"
                )
        if not found:
            raise argparse.ArgumentTypeError(f"is empty; expected some of {', '.join(allowed)}")
        return found

    return words


def arches(text: str) -> tuple[str, ...]:
    found = tuple(arch(word) for word in text.replace(",", " ").split())
    if not found:
        raise argparse.ArgumentTypeError("is empty; expected architectures such as sm_90,sm_100")
    return found


def arch(text: str) -> str:
    if not re.fullmatch(r"sm_[0-9]{1,9}[af]?", text):
        raise argparse.ArgumentTypeError(
            f"is {shown(text)}; expected an architecture such as sm_90"
        )
    if not text[-1].isdecimal():  # a run looks for the kernels of its device's plain name
        plain = text.rstrip("af")
        raise argparse.ArgumentTypeError(f"is {shown(text)}; expected no suffix. Write {plain}")
    if int(text.removeprefix("sm_")) < 80:
        raise argparse.ArgumentTypeError(f"is {shown(text)}; expected sm_80 or newer")
    return text


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(word) for word in _nonempty(text.replace(",", " ").split(), text))


def count(text: str) -> int:
    if not is_count(text):
        raise argparse.ArgumentTypeError(f"is {shown(text)}; expected an integer >= 1")
    if is_beyond(text):
        raise argparse.ArgumentTypeError(f"is {shown(text)}; expected at most 2^40 = {MOST}")
    return int(text)


def is_count(text: str) -> bool:
    """Whether text is an integer >= 1, of any length."""
    return text.isascii() and text.isdecimal() and text.strip("0") != ""


def is_beyond(count: str) -> bool:
    """Whether a count is more than MOST."""
    return len(count) > 99 or int(count) > MOST  # Python reads no number of some thousand digits


def _nonempty(words: Iterable[str], text: str) -> list[str]:
    found = list(words)
    if not found:
        raise argparse.ArgumentTypeError(f"is {shown(text)}; expected integers >= 1")
    return found
