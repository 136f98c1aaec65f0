"""A product over more mesh axes than are searched at a time, narrowed down to fewer.

In this order, until few enough are left: axes that shard the same loop of operands and result alike
stay where they are; axes that always go together count as one; the axes of the smallest dims are
gathered first. The last one alone may miss the cheapest plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from shardops.rules.gemm_search import Choice, Problem, cheapest
from shardops.rules.moves import MOST_AXES
from shardops.rules.spec import Axes, Spec, axes_in, common_prefix, cut_before, local_shape
from shardops.rules.tied import apart, as_one, sizes_as_one, tied_pair


def search(problem: Problem) -> Choice:
    """The layout of least cost; over many axes of those that are left after narrowing."""
    if len(problem.axes) <= MOST_AXES:
        return cheapest(problem)
    problem = replace(problem, whole=True)  # parts of axes would be more still
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
    lhs_stay, rhs_stay = dims.of_operand(stay, 0), dims.of_operand(stay, 1)
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
    pair = tied_pair(problem.axes, specs, (problem.unreduced,))
    if pair is None or {*pair} & {*problem.unreduced}:
        return None
    sizes = sizes_as_one(tuple((a, problem.sizes[a]) for a in problem.axes), pair)
    found = search(
        replace(
            problem,
            axes=tuple(a for a, _ in sizes),
            sizes={**problem.sizes, **dict(sizes)},
            lhs=frozenset(as_one(s, pair) for s in problem.lhs),
            rhs=frozenset(as_one(s, pair) for s in problem.rhs),
            target=None if problem.target is None else as_one(problem.target, pair),
        )
    )
    return Choice(apart(found.loops, pair), apart(found.target, pair))


def _without_least(problem: Problem) -> Choice:
    """Gather the axis that shards the least first."""
    dims = problem.dims

    def elements(axis: str) -> int:
        lies = [(dims.lhs_shape, s) for s in problem.lhs] + [
            (dims.rhs_shape, s) for s in problem.rhs
        ]
        return sum(prod(shape) for shape, spec in lies if axis in axes_in(spec))

    # Not one whose sum is to stay open.
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


def _after(spec: Spec, prefix: Sequence[Axes]) -> Spec:
    return tuple(axes[len(p) :] for axes, p in zip(spec, prefix, strict=True))


def _joined(first: Sequence[Axes], rest: Sequence[Axes]) -> Spec:
    return tuple(a + b for a, b in zip(first, rest, strict=True))
