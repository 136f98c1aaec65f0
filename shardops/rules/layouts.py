"""Every layout of one array over a few mesh axes, and the cheapest way from each to each.

A layout is, for each dim, the axes that shard it, and the axes over which partial sums are pending.
A step from one to the next costs a part of the whole array: what a device receives, under ring
algorithms.

| step         | from -> to                                      | received          |
|--------------|-------------------------------------------------|-------------------|
| slice        | an unused axis cuts a dim further               | nothing           |
| all_gather   | the minor axes of a dim leave it                | result (n-1)/n    |
| all_to_all   | the minor axes of a dim become minor on another | operand (n-1)/n   |
| ppermute     | any layout with equal local shapes              | operand           |
| psum         | pending axes are summed                         | 2 operand (n-1)/n |
| psum_scatter | pending axes are summed, and cut a dim further  | operand (n-1)/n   |
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, permutations
from math import prod
from typing import NamedTuple

import numpy as np

from shardops.rules.step import StepKind

Numbers = tuple[int, ...]  # mesh axes as numbers
Node = tuple[Numbers, ...]  # one entry a dim, and a last one: the pending axes, sorted

# What a collective, and what a slice, weighs in units of the smallest part that can be received:
# of equal paths the one with fewer collectives is taken, then the one with fewer slices.
_COLLECTIVE, _SLICE = 1e-3, 1e-6


class Edge(NamedTuple):
    """A step between two layouts."""

    kind: StepKind
    axes: Numbers
    after: Node
    received: float  # part of the whole array
    dim: int = -1
    to_dim: int = -1


class Layouts:
    """The layouts of an array as a graph. `layouts_of` remembers each."""

    def __init__(self, units: Numbers, sizes: Numbers, sums: bool):
        self.units, self.sizes = units, sizes
        self._counts: dict[Numbers, int] = {}
        # Parts received are held (n-1) or held (n-1)/n: whole multiples of this.
        self.unit = 1 / prod(sizes) ** 2
        self.nodes = _nodes(units, sizes, sums)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.held = np.array([1 / self._shards(node[:-1]) for node in self.nodes])
        self._alike: dict[object, list[Node]] = {}
        for node in self.nodes:
            self._alike.setdefault(self._local_shape(node), []).append(node)
        self._edges: dict[int, list[Edge]] = {}
        tails, heads, weights = [], [], []
        for tail in range(len(self.nodes)):
            tails.append(tail)  # a way to stay, so that each node has one to come and one to go
            heads.append(tail)
            weights.append(0.0)
            for edge in self.edges(tail):
                tails.append(tail)
                heads.append(self.index[edge.after])
                weights.append(self.weight(edge))
        self._steps = (np.array(tails), np.array(heads), np.array(weights))
        self._from: dict[frozenset[int], np.ndarray] = {}
        self._to: dict[frozenset[int], np.ndarray] = {}

    def weight(self, edge: Edge) -> float:
        """What the search adds up."""
        small = _SLICE if edge.kind == "slice" else _COLLECTIVE
        return edge.received + small * self.unit

    def collectives(self, costs: np.ndarray) -> np.ndarray:
        """How many collectives are in paths of these costs."""
        units = np.where(np.isfinite(costs), costs, 0) / self.unit
        return np.rint((units - np.floor(units + _SLICE)) / _COLLECTIVE)

    def edges(self, tail: int) -> list[Edge]:
        """The steps from a layout."""
        if tail not in self._edges:
            self._edges[tail] = list(self._steps_from(self.nodes[tail]))
        return self._edges[tail]

    def costs_from(self, sources: frozenset[int]) -> np.ndarray:
        """What it costs to reach each layout from the cheapest of `sources`."""
        if sources not in self._from:
            start = np.full(len(self.nodes), np.inf)
            start[list(sources)] = 0
            tails, heads, weights = self._steps
            self._from[sources] = _settle(start, tails, heads, weights)
        return self._from[sources]

    def costs_to(self, targets: frozenset[int]) -> np.ndarray:
        """What it costs to get from each layout to the cheapest of `targets`."""
        if targets not in self._to:
            start = np.full(len(self.nodes), np.inf)
            start[list(targets)] = 0
            tails, heads, weights = self._steps
            self._to[targets] = _settle(start, heads, tails, weights)
        return self._to[targets]

    def path(self, source: int, targets: frozenset[int]) -> list[Edge]:
        """The cheapest steps from a layout to any of some others."""
        costs, steps = self.costs_to(targets), []
        while costs[source] > 0:
            best = min(
                self.edges(source), key=lambda e: self.weight(e) + costs[self.index[e.after]]
            )
            steps.append(best)
            source = self.index[best.after]
        return steps

    def _steps_from(self, node: Node) -> Iterator[Edge]:
        dims, pending = node[:-1], node[-1]
        held = 1 / self._shards(dims)
        used = {a for d in node for a in d}
        for d, have in enumerate(dims):
            for axis in range(len(self.sizes)):
                if axis not in used and self._fits(d, (*have, axis)):
                    yield Edge("slice", (axis,), _with(node, d, (*have, axis)), 0.0, d)
            for cut in range(len(have)):
                axes, n = have[cut:], self._count(have[cut:])
                rest = _with(node, d, have[:cut])
                yield Edge("all_gather", axes, rest, held * (n - 1), d)
                for e, other in enumerate(dims):
                    if e != d and self._fits(e, other + axes):
                        moved = _with(rest, e, other + axes)
                        yield Edge("all_to_all", axes, moved, held * (n - 1) / n, d, e)
        for other in self._alike[self._local_shape(node)]:
            if other != node:
                axes = tuple(sorted({a for d in (*dims, *other[:-1]) for a in d}))
                yield Edge("ppermute", axes, other, held)
        yield from self._sums_from(node, pending, held)

    def _sums_from(self, node: Node, pending: Numbers, held: float) -> Iterator[Edge]:
        for count in range(1, len(pending) + 1):
            for axes in combinations(pending, count):
                n = self._count(axes)
                left = tuple(a for a in pending if a not in axes)
                done = (*node[:-1], left)
                yield Edge("psum", axes, done, 2 * held * (n - 1) / n)
                for d, have in enumerate(node[:-1]):
                    if not self._fits(d, have + axes):
                        continue
                    for order in permutations(axes):
                        cut = _with(done, d, have + order)
                        yield Edge("psum_scatter", order, cut, held * (n - 1) / n, d)

    def _fits(self, dim: int, axes: Numbers) -> bool:
        return self.units[dim] % self._count(axes) == 0

    def _count(self, axes: Numbers) -> int:
        count = self._counts.get(axes)
        if count is None:
            count = self._counts[axes] = prod(self.sizes[a] for a in axes)
        return count

    def _shards(self, dims: tuple[Numbers, ...]) -> int:
        return prod(self._count(d) for d in dims)

    def _local_shape(self, node: Node) -> tuple[Numbers, Numbers]:
        return tuple(self._count(d) for d in node[:-1]), node[-1]


@lru_cache(maxsize=256)
def layouts_of(units: Numbers, sizes: Numbers, sums: bool = False) -> Layouts:
    """The layouts of an array.

    Args:
      units: for each dim, into how many equal parts it may be cut: parts that divide this number.
      sizes: of the mesh axes.
      sums: whether sums may be pending.
    """
    return Layouts(units, sizes, sums)


def _nodes(units: Numbers, sizes: Numbers, sums: bool) -> list[Node]:
    """Each axis on one dim, in any order there, pending, or idle."""
    found: dict[tuple[Numbers, ...], None] = {((),) * len(units): None}
    edge = list(found)
    while edge:
        grown: dict[tuple[Numbers, ...], None] = {}
        for dims in edge:
            used = {a for d in dims for a in d}
            for axis in range(len(sizes)):
                for d, have in enumerate(dims):
                    parts = prod(sizes[a] for a in have) * sizes[axis]
                    if axis not in used and units[d] % parts == 0:
                        grown[_with(dims, d, (*have, axis))] = None
        edge = [dims for dims in grown if dims not in found]
        found |= grown
    nodes: list[Node] = []
    for dims in found:
        idle = [a for a in range(len(sizes)) if not any(a in d for d in dims)]
        for count in range(len(idle) + 1 if sums else 1):
            nodes += [(*dims, pending) for pending in combinations(idle, count)]
    return nodes


def _with(entries: tuple[Numbers, ...], at: int, axes: Numbers) -> tuple[Numbers, ...]:
    return (*entries[:at], axes, *entries[at + 1 :])


def _settle(
    costs: np.ndarray, tails: np.ndarray, heads: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Relax all steps at once until nothing becomes cheaper."""
    order = np.argsort(heads, kind="stable")
    tails, weights = tails[order], weights[order]
    starts = np.searchsorted(heads[order], np.arange(len(costs)))
    while True:
        better = np.minimum.reduceat(costs[tails] + weights, starts)
        if np.array_equal(better, costs):
            return costs
        costs = better
