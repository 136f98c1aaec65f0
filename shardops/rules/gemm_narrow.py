"""A product over more mesh axes than are searched at a time, narrowed down to fewer.

In this order, until few enough are left: axes that shard the same loop of operands and result alike
stay where they are; axes that always go together count as one; the axes of the smallest dims are
gathered first. The last one alone may miss the cheapest plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from shardops.rules.gemm_dims import GemmDims
from shardops.rules.gemm_search import Choice, Problem, cheapest
from shardops.rules.moves import MOST_AXES
from shardops.rules.spec import Axes, Spec, axes_in, common_prefix, cut_before, local_shape


def search(problem: Problem) -> Choice:
    """The layout of least cost; over many axes of those that are left after narrowing."""
    if len(problem.axes) <= MOST_AXES:
        return cheapest(problem)
    for narrow in (_without_settled, _with_tied_as_one):
        choice = narrow(problem)
        if choice is not None:
            return choice
    return _without_least(problem)


def _without_settled(problem: Problem) -> Choice | None:
    """Leave out the major axes that operands and result have on the same loop."""
    dims = problem.dims
    kept = len(dims.out_shape)
    stay: list[Axes] = []
    for n, (i, j) in enumerate(dims.loops):
        lies = [s[i] for s in problem.lhs] if i is not None else []
        lies += [s[j] for s in problem.rhs] if j is not None else []
        if problem.target is not None and n < kept:
            lies.append(problem.target[n])
        common = lies[0] if n < kept else ()
        for axes in lies[1:]:
            common = common_prefix(common, axes)
        stay.append(common)
    # An axis of a loop that only one operand has may shard another dim of the other one.
    for side, specs in ((0, problem.lhs), (1, problem.rhs)):
        for n, pair in enumerate(dims.loops):
            d = pair[side]
            elsewhere = {a for s in specs for e, axes in enumerate(s) if e != d for a in axes}
            stay[n] = cut_before(stay[n], elsewhere)
    if not any(stay):
        return None
    lhs_stay, rhs_stay = _of_operand(dims, stay, 0), _of_operand(dims, stay, 1)
    rest = replace(
        problem,
        dims=replace(
            dims,
            lhs_shape=local_shape(dims.lhs_shape, lhs_stay, problem.sizes),
            rhs_shape=local_shape(dims.rhs_shape, rhs_stay, problem.sizes),
        ),
        axes=tuple(a for a in problem.axes if a not in axes_in(stay)),
        lhs=frozenset(_after(s, lhs_stay) for s in problem.lhs),
        rhs=frozenset(_after(s, rhs_stay) for s in problem.rhs),
        target=None if problem.target is None else _after(problem.target, stay[:kept]),
    )
    found = search(rest)
    return Choice(_joined(stay, found.loops), _joined(stay[:kept], found.target))


def _with_tied_as_one(problem: Problem) -> Choice | None:
    """Count two axes that stand next to each other wherever either stands as one axis."""
    specs = [*problem.lhs, *problem.rhs, *([problem.target] if problem.target else [])]
    for a in problem.axes:
        for b in problem.axes:
            if a != b and not {a, b} & {*problem.unreduced} and _tied(a, b, specs):
                break
        else:
            continue
        both = f"{a}+{b}"
        names = {both: (a, b)}

        def merged(spec: Spec, a: str = a, b: str = b, both: str = both) -> Spec:
            return tuple(tuple(both if x == a else x for x in d if x != b) for d in spec)

        found = search(
            replace(
                problem,
                axes=tuple(both if x == a else x for x in problem.axes if x != b),
                sizes={**problem.sizes, both: problem.sizes[a] * problem.sizes[b]},
                lhs=frozenset(map(merged, problem.lhs)),
                rhs=frozenset(map(merged, problem.rhs)),
                target=None if problem.target is None else merged(problem.target),
            )
        )
        return Choice(_expanded(found.loops, names), _expanded(found.target, names))
    return None


def _without_least(problem: Problem) -> Choice:
    """Gather the axis that shards the least first."""
    dims = problem.dims

    def elements(axis: str) -> int:
        lies = [(dims.lhs_shape, s) for s in problem.lhs] + [
            (dims.rhs_shape, s) for s in problem.rhs
        ]
        return sum(prod(shape) for shape, spec in lies if axis in axes_in(spec))

    least = min(problem.axes, key=elements)
    lost = {least} if least not in problem.unreduced else set()
    if not lost:  # its sum was asked for: another one then
        lost = {min((a for a in problem.axes if a not in problem.unreduced), key=elements)}

    def without(spec: Spec) -> Spec:
        return tuple(cut_before(d, lost) for d in spec)

    found = search(
        replace(
            problem,
            axes=tuple(a for a in problem.axes if a not in lost),
            lhs=frozenset(map(without, problem.lhs)),
            rhs=frozenset(map(without, problem.rhs)),
            target=None if problem.target is None else without(problem.target),
        )
    )
    return Choice(found.loops, found.target if problem.target is None else problem.target)


def _tied(a: str, b: str, specs: Sequence[Spec]) -> bool:
    together = False
    for spec in specs:
        for axes in spec:
            if (a in axes) != (b in axes):
                return False
            if a in axes:
                if axes.index(b) != axes.index(a) + 1:
                    return False
                together = True
    return together


def _of_operand(dims: GemmDims, loops: Sequence[Axes], side: int) -> Spec:
    spec: list[Axes] = [()] * len((dims.lhs_shape, dims.rhs_shape)[side])
    for pair, axes in zip(dims.loops, loops, strict=True):
        d = pair[side]
        if d is not None:
            spec[d] = axes
    return tuple(spec)


def _after(spec: Spec, prefix: Sequence[Axes]) -> Spec:
    return tuple(axes[len(p) :] for axes, p in zip(spec, prefix, strict=True))


def _joined(first: Sequence[Axes], rest: Sequence[Axes]) -> Spec:
    return tuple(a + b for a, b in zip(first, rest, strict=True))


def _expanded(spec: Sequence[Axes], names: dict[str, Axes]) -> Spec:
    return tuple(tuple(x for a in d for x in names.get(a, (a,))) for d in spec)
