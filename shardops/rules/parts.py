"""Parts of mesh axes: an axis of four devices is two of two, and either may move alone.

`tp[0]` is the major part of an axis `tp`, `tp[1]` the next. Steps of a plan may name parts; where
operands and results lie is always said in whole axes.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardops.errors import shown, wrong
from shardops.rules.spec import Axes, AxisSizes, Sizes, Spec
from shardops.rules.step import Step

Parts = dict[str, Axes]  # of each axis, major to minor

_PART = re.compile(r"(.*)\[(\d+)\]")


def check_names(axis_sizes: AxisSizes) -> None:
    """Refuse mesh axes that are called like parts of axes, or like several axes as one."""
    for name, _ in axis_sizes:
        if _PART.fullmatch(name) or "+" in name:
            want = "names without + and that do not end in a number in brackets"
            fix = "Such names stand for several axes, and for parts of axes: rename the axis."
            raise ValueError(wrong("shardops", "a mesh axis", shown(name), want, fix))


def factors(size: int) -> tuple[int, ...]:
    """The prime factors of a number of devices, the sizes of an axis' parts."""
    found, divisor = [], 2
    while size > 1:
        while size % divisor == 0:
            found.append(divisor)
            size //= divisor
        divisor += 1
    return tuple(found)


def parts_of(axis: str, size: int) -> Axes:
    """The names of an axis' parts; of an axis that has none its own."""
    count = len(factors(size))
    return (axis,) if count < 2 else tuple(f"{axis}[{i}]" for i in range(count))


def split(axis_sizes: AxisSizes, most: int) -> Parts | None:
    """The parts of axes of more than one device; None where none has any, or they are too many."""
    parts = {a: parts_of(a, n) for a, n in axis_sizes if n > 1}
    count = sum(map(len, parts.values()))
    return parts if len(parts) < count <= most else None


def part_sizes(axis_sizes: AxisSizes, parts: Parts) -> AxisSizes:
    """The mesh with parts for axes."""
    sizes = dict(axis_sizes)
    return tuple((p, size_of(p, sizes)) for a, n in axis_sizes if n > 1 for p in parts[a])


def parted(spec: Sequence[Axes], parts: Parts) -> Spec:
    """`spec` with the parts of its axes."""
    return tuple(tuple(p for a in axes for p in parts.get(a, (a,))) for axes in spec)


def joined(spec: Sequence[Axes], parts: Parts) -> Spec:
    """`spec` with an axis wherever all of its parts follow each other."""
    return tuple(_joined(axes, parts) for axes in spec)


def _joined(axes: Axes, parts: Parts) -> Axes:
    for axis, own in parts.items():
        for at in range(len(axes) - len(own) + 1):
            if len(own) > 1 and axes[at : at + len(own)] == own:
                axes = (*axes[:at], axis, *axes[at + len(own) :])
                break
    return axes


def step_joined(step: Step, parts: Parts) -> Step:
    """A step over parts, over axes where it can be said so."""
    return replace(
        step,
        axes=_joined(step.axes, parts),
        before=joined(step.before, parts),
        after=joined(step.after, parts),
    )


def axis_of(name: str) -> str:
    """The mesh axis that a name stands for, or for a part of."""
    found = _PART.fullmatch(name)
    return found[1] if found else name


def size_of(name: str, sizes: Sizes) -> int:
    """How many devices there are along an axis or a part of one."""
    found = _PART.fullmatch(name)
    return factors(sizes[found[1]])[int(found[2])] if found else sizes[name]


def coordinate(name: str, index: Any, sizes: Sizes) -> Any:
    """Where a device at `index` (a number, or a traced one) along the axis is along `name`."""
    found = _PART.fullmatch(name)
    if not found:
        return index
    own = factors(sizes[found[1]])
    for factor in own[: int(found[2]) : -1]:
        index //= factor
    return index % own[int(found[2])]
