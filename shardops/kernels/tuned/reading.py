"""A table of launch shapes from a file that anyone may have written."""

import json
import pathlib
from dataclasses import fields
from typing import Any

from shardops.kernels.cache import content
from shardops.kernels.norm_ragged import Ragged
from shardops.kernels.norm_registers import Geometry
from shardops.kernels.norm_staged import Staged

_MOST_THREADS = 1024  # of a block


def read(path: pathlib.Path) -> dict[str, Geometry | Ragged | Staged]:
    """The shapes of a table by key.

    Raises: OSError where there is no such file, ValueError where an entry is no launch shape.
    """
    try:
        entries = json.loads(content(path))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(entries, dict):
        raise ValueError(f"it is a {type(entries).__name__}, not an object")
    return {key: _shape(key, entry) for key, entry in entries.items()}


def _shape(key: str, entry: Any) -> Geometry | Ragged | Staged:
    if not isinstance(entry, dict):
        raise ValueError(f"{key!r} is a {type(entry).__name__}, not an object")
    kind = Staged if "stages" in entry else Ragged if "turns" in entry else Geometry
    types = {field.name: field.type for field in fields(kind)}
    for name, value in entry.items():
        if type(value) is not types.get(name) or (types[name] is int and value < 1):
            raise ValueError(f"{key!r} has {name!r}: {value!r}")
    try:
        shape = kind(**entry)
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"{key!r}: {error}") from error
    row = shape.threads_per_row
    threads = shape.threads if isinstance(shape, Staged) else row * shape.rows_per_block
    if threads > _MOST_THREADS or threads % 32 or threads % row:
        raise ValueError(f"{key!r} has blocks of {threads} threads, {row} a row")
    if row % 32 and row & (row - 1):
        raise ValueError(f"{key!r} has {row} threads a row, no power of two and no whole warps")
    return shape
