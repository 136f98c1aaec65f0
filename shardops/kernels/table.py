"""Compiled kernels as lines of a table."""

from collections.abc import Mapping
from typing import Any

from shardops.kernels.families import DTYPES

_NAME = 27  # columns: the longest name, and two spaces
HEAD = f"{'kernel':{_NAME}}{'arch':9}{'bytes':>8}{'registers':>11}{'spilled':>9}{'shared':>8}"


def row(about: Mapping[str, Any]) -> str:
    """A kernel's name and sizes, under HEAD; `about` as `compile.compile_kernel` gives it."""
    taken = about["resources"] or {}
    numbers = (taken.get("registers"), spilled(about), taken.get("shared_bytes"))
    shown = ["?" if number is None else f"{number:,}" for number in numbers]
    name = f"{about['kernel']:{_NAME}}{about['arch']:9}{about['code_bytes']:8,}"
    return f"{name}{shown[0]:>11}{shown[1]:>9}{shown[2]:>8}"


def spilled(about: Mapping[str, Any]) -> int | None:
    """Bytes that a thread moves between registers and local memory; None where it is not known."""
    taken = about["resources"]
    return None if taken is None else taken["spill_store_bytes"] + taken["spill_load_bytes"]


def constants(of: Mapping[str, int]) -> str:
    """The constants that say something: no switch that is off, types by their names."""
    words = []
    for name, value in of.items():
        if name.endswith("_TYPE"):
            if of.get(f"HAS_{name.removesuffix('_TYPE')}", 1):
                value = DTYPES[value] if 0 <= value < len(DTYPES) else value
                words.append(f"{name.removesuffix('_TYPE').lower()}={value}")
        elif value:
            words.append(f"{name.lower()}={value}")
    return " ".join(words)


def order(about: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key to sort by: by architecture, kernel, row length."""
    return about["arch"], about["kernel"], sorted(about["constants"].items())
