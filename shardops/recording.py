"""What `explain` reads: each op, as the router placed it on a mesh or on one device."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from shardops.op import AxisSizes, Op, Placement, Shapes, Wanted
from shardops.rules.spec import Spec


@dataclass(frozen=True)
class Record:
    """One call of an op, on a mesh or on one device."""

    op: Op
    route: str  # "explicit" | "auto" | "alone": on one device | "planned": on no device
    shapes: Shapes
    dtypes: tuple[str, ...]
    offered: tuple[Spec, ...]  # where the operands lay
    wanted: Wanted
    sizes: AxisSizes
    placement: Placement


# Part of JAX's own cache keys: inside the context functions are traced and partitioned anew.
_token = jax.make_user_context(None)
_numbers = itertools.count(1)
_lists: dict[int, list[Record]] = {}


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """Collect a record of each op that is placed in the block: traced on Explicit axes, compiled on
    Auto ones."""
    number = next(_numbers)
    _lists[number] = []
    try:
        with _token(number):
            yield _lists[number]
    finally:
        del _lists[number]


def token() -> int | None:
    """Which recording is on; None outside of one."""
    return _token.value


def record(to: int | None, entry: Record) -> None:
    """Add to a recording, if it is still on."""
    if to in _lists:
        _lists[to].append(entry)
