"""The cheapest way to take one array from one sharding to another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from shardops.rules.layouts import Edge, Layouts, Node, layouts_of
from shardops.rules.parts import part_sizes, parted, split, step_joined
from shardops.rules.reduction import sum_steps
from shardops.rules.spec import Axes, AxisSizes, Sizes, Spec, axes_in, common_prefix, only, shards
from shardops.rules.step import Step
from shardops.rules.tied import as_one, sizes_as_one, step_apart, tied_pair

MOST_AXES = 3  # that are searched at a time; layouts over more are too many
MOST_DIMS = 4  # unless more than these have an axis


def move(
    shape: Sequence[int],
    have: Spec,
    want: Spec,
    axis_sizes: AxisSizes,
    itemsize: float = 1,
    array: str = "",
    whole: bool = False,
) -> tuple[Step, ...]:
    """Steps that take an array from `have` to `want`, both of which divide it.

    Args:
      shape: global.
      axis_sizes: (mesh axis, devices along it) pairs.
      itemsize: bytes of an element.
      array: its name in the steps.
      whole: whether steps may name whole axes only, not parts of them.
    Returns: the steps that move the fewest bytes, of equals the fewest collectives. Exact for
      arrays of up to four dims on meshes of up to three axes; beyond that, axes and dims that
      change are searched, and where more than three axes do, dims are gathered, then cut.
    """
    if have == want:
        return ()
    return sum_and_move(shape, have, (), want, (), axis_sizes, itemsize, array, whole)


@lru_cache(maxsize=4096)
def _way(
    shape: tuple[int, ...],
    have: Spec,
    pending: Axes,
    want: Spec,
    left: Axes,
    axis_sizes: AxisSizes,
    whole: bool,
) -> tuple[Step, ...]:
    """Steps from `have` with `pending` sums to `want`, where those over `left` are open still."""
    parts = None if whole else split(axis_sizes, MOST_AXES)
    if parts:
        (sums, kept), fine = parted((pending, left), parts), part_sizes(axis_sizes, parts)
        steps = _way(shape, parted(have, parts), sums, parted(want, parts), kept, fine, True)
        return tuple(step_joined(s, parts) for s in steps)
    ways = []
    where = _searched(shape, have, want, pending, axis_sizes)
    if where is not None:
        ways.append(where.path(have, pending, want, left))
    if sum(n > 1 for _, n in axis_sizes) > MOST_AXES:
        pair = tied_pair(dict(axis_sizes), (have, want), (pending, left))
        if pair is not None:
            (sums, kept), sizes = as_one((pending, left), pair), sizes_as_one(axis_sizes, pair)
            steps = _way(shape, as_one(have, pair), sums, as_one(want, pair), kept, sizes, True)
            ways.append(tuple(step_apart(s, pair) for s in steps))
    if ways:
        return min(ways, key=lambda way: (sum(s.bytes for s in way), len(way)))
    if not pending:
        return _directly(shape, have, want, dict(axis_sizes))
    summed = tuple(a for a in pending if a not in left)
    free = tuple((a, n) for a, n in axis_sizes if a not in left)
    return sum_first(shape, have, summed, want, free, whole=True)


@dataclass(frozen=True)
class Region:
    """The part of an array's layouts that a search covers."""

    shape: tuple[int, ...]
    stay: Spec  # major axes of each dim that do not move
    dims: tuple[int, ...]
    axes: Axes
    sizes: tuple[int, ...]  # of these axes
    local: tuple[int, ...]  # the shape, cut by what stays

    def path(self, have: Spec, pending: Axes, want: Spec, left: Axes) -> tuple[Step, ...]:
        """The cheapest steps; sums over `pending` axes are carried out, but for those in `left`."""
        most = prod(self.sizes)
        cut = tuple(gcd(self.local[d], most) for d in self.dims)
        graph = layouts_of(cut, self.sizes, bool(pending))
        start = self._number(graph, have, pending)
        edges = graph.path(start, frozenset([self._number(graph, want, left)]))
        steps = to_steps(graph, edges, start, self.axes, prod(self.local))
        return tuple(lifted(s, self.dims, self.stay) for s in steps)

    def _number(self, graph: Layouts, spec: Spec, sums: Axes) -> int:
        entries = (as_numbers(spec[d][len(self.stay[d]) :], self.axes) for d in self.dims)
        return graph.index[*entries, tuple(sorted(as_numbers(sums, self.axes)))]


def _searched(
    shape: tuple[int, ...],
    have: Spec,
    want: Spec,
    pending: Axes,
    axis_sizes: AxisSizes,
) -> Region | None:
    """What is searched: everything on a mesh of few axes, else what changes; None: too much."""
    sizes = {a: n for a, n in axis_sizes if n > 1}
    axes, stay = tuple(sizes), ((),) * len(shape)
    if len(axes) > MOST_AXES:
        stay = tuple(
            common_prefix(a, b) for a, b in zip(only(have, sizes), only(want, sizes), strict=True)
        )
        changing = {*axes_in(have), *axes_in(want), *pending} - {*axes_in(stay)}
        axes = tuple(a for a in sizes if a in changing)
    if len(axes) > MOST_AXES:
        return None
    local = tuple(n // shards(s, sizes) for n, s in zip(shape, stay, strict=True))
    named = [d for d in range(len(shape)) if have[d] != stay[d] or want[d] != stay[d]]
    # A dim that neither names may be where an axis waits; the one that can be cut most will do.
    others = [d for d in range(len(shape)) if d not in named]
    most = prod(sizes[a] for a in axes)
    others.sort(key=lambda d: -gcd(local[d], most))
    room = max(MOST_DIMS - len(named), 1)
    dims = tuple(sorted(named + others[:room]))
    return Region(shape, stay, dims, axes, tuple(sizes[a] for a in axes), local)


def _directly(shape: tuple[int, ...], have: Spec, want: Spec, sizes: Sizes) -> tuple[Step, ...]:
    """Gather what does not stay, dim by dim, then cut."""
    stay = tuple(common_prefix(a, b) for a, b in zip(have, want, strict=True))
    steps, now = [], list(have)
    for d, axes in enumerate(stay):
        if now[d] != axes:
            lost, before = now[d][len(axes) :], tuple(now)
            now[d] = axes
            n = shards(lost, sizes)
            local = prod(shape) / shards(axes_in(now), sizes)
            steps.append(Step("all_gather", lost, before, tuple(now), local * (n - 1) / n, dim=d))
    for d, axes in enumerate(want):
        if now[d] != axes:
            before = tuple(now)
            now[d] = axes
            steps.append(Step("slice", axes[len(stay[d]) :], before, tuple(now), dim=d))
    return tuple(steps)


def units(shape: Sequence[int], axes: Axes, sizes: Sizes) -> tuple[int, ...]:
    """Into how many parts each dim may be cut, as far as these axes go."""
    most = prod(sizes[a] for a in axes)
    return tuple(gcd(n, most) for n in shape)


def as_numbers(axes: Iterable[str], names: Axes) -> tuple[int, ...]:
    """Mesh axes by their place in `names`; those that are not there are left out."""
    return tuple(names.index(a) for a in axes if a in names)


def to_steps(
    graph: Layouts, edges: Sequence[Edge], start: int, names: Axes, elements: float
) -> list[Step]:
    """The steps of a path, with axes by name and the elements that a device receives.

    Cuts of one dim that follow each other are one step.
    """

    def spec(node: Node) -> Spec:
        return tuple(tuple(names[a] for a in d) for d in node[:-1])

    steps: list[Step] = []
    before = spec(graph.nodes[start])
    for edge in edges:
        after = spec(edge.after)
        axes = tuple(names[a] for a in edge.axes)
        last = steps[-1] if steps else None
        if last and last.kind == edge.kind == "slice" and last.dim == edge.dim:
            steps[-1] = replace(last, axes=last.axes + axes, after=after)
        else:
            received = edge.received * elements
            steps.append(
                Step(edge.kind, axes, before, after, received, dim=edge.dim, to_dim=edge.to_dim)
            )
        before = after
    return steps


def lifted(step: Step, dims: Sequence[int], stay: Spec) -> Step:
    """A step over some dims of an array, as one of the whole; `stay` is what does not move."""

    def whole(spec: Spec) -> Spec:
        entries = list(stay)
        for d, axes in zip(dims, spec, strict=True):
            entries[d] = stay[d] + axes
        return tuple(entries)

    return replace(
        step,
        before=whole(step.before),
        after=whole(step.after),
        dim=dims[step.dim] if step.dim >= 0 else -1,
        to_dim=dims[step.to_dim] if step.to_dim >= 0 else -1,
    )


def sum_and_move(
    shape: Sequence[int],
    have: Spec,
    pending: Axes,
    want: Spec,
    left: Axes,
    axis_sizes: AxisSizes,
    itemsize: float = 1,
    array: str = "",
    whole: bool = False,
) -> tuple[Step, ...]:
    """Steps that sum an array over `pending` axes, but for those in `left`, and take it to `want`.

    As cheap as `move`; over more than three axes sums are scattered where `want` has their axes,
    and the rest is moved after.
    """
    steps = _way(tuple(shape), have, pending, want, left, axis_sizes, whole)
    return tuple(replace(s, bytes=s.bytes * itemsize, array=array) for s in steps)


def sum_first(
    shape: Sequence[int],
    have: Spec,
    pending: Axes,
    want: Spec,
    axis_sizes: AxisSizes,
    itemsize: float = 1,
    array: str = "",
    whole: bool = False,
) -> tuple[Step, ...]:
    """Steps that sum over `pending` axes at once, scattered where `want` has them, and move then.

    What small arrays want, whose collectives cost their latency.
    """
    steps = sum_steps(shape, have, pending, want, dict(axis_sizes), itemsize, array)
    now = steps[-1].after if steps else have
    return (*steps, *move(shape, now, want, axis_sizes, itemsize, array, whole))
