"""Mesh axes that always go together, counted as one: fewer layouts to search."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardops.rules.spec import Axes, AxisSizes, Spec
from shardops.rules.step import Step

Pair = tuple[str, str]


def tied_pair(axes: Iterable[str], specs: Sequence[Spec], sets: Sequence[Axes] = ()) -> Pair | None:
    """Two axes that stand next to each other wherever either stands, and are in the same `sets`."""
    named = [a for a in axes if any(a in d for s in specs for d in s)]
    for a in named:
        for b in named:
            if a != b and all((a in s) == (b in s) for s in sets) and _tied(a, b, specs):
                return a, b
    return None


def _tied(a: str, b: str, specs: Sequence[Spec]) -> bool:
    for axes in (d for spec in specs for d in spec):
        if (a in axes) != (b in axes):
            return False
        if a in axes and axes.index(b) != axes.index(a) + 1:
            return False
    return True


def name_of(pair: Pair) -> str:
    """The name of two axes as one."""
    return "+".join(pair)


def as_one(spec: Sequence[Axes], pair: Pair) -> Spec:
    """`spec` with the pair as one axis."""
    a, b = pair
    return tuple(tuple(name_of(pair) if x == a else x for x in d if x != b) for d in spec)


def sizes_as_one(axis_sizes: AxisSizes, pair: Pair) -> AxisSizes:
    """The mesh with the pair as one axis."""
    (a, b), sizes = pair, dict(axis_sizes)
    both = (name_of(pair), sizes[a] * sizes[b])
    return tuple(both if x == a else (x, n) for x, n in axis_sizes if x != b)


def apart(spec: Sequence[Axes], pair: Pair) -> Spec:
    """`as_one` undone."""
    both = name_of(pair)
    return tuple(tuple(x for a in d for x in (pair if a == both else (a,))) for d in spec)


def step_apart(step: Step, pair: Pair) -> Step:
    """A step of the pair as one axis as a step of both."""
    (axes,) = apart((step.axes,), pair)
    return replace(step, axes=axes, before=apart(step.before, pair), after=apart(step.after, pair))
