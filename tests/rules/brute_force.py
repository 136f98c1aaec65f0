"""The fewest bytes that a product of sharded arrays has to move, found by trying everything.

Written from the model alone, without the planner, so that the two can disagree. An array lies on a
mesh in a layout: for each dim the axes that cut it, major to minor; over the others it is copied.
One move takes it to another layout. Of n devices in a group each one receives, by ring algorithms:

| move         |                                                     | bytes received     |
|--------------|-----------------------------------------------------|--------------------|
| slice        | an unused axis cuts a dim further                   | 0                  |
| all_gather   | the last axes of a dim leave it                     | result · (n-1)/n   |
| all_to_all   | the last axes of a dim go to the end of another one | shard · (n-1)/n    |
| ppermute     | to any layout with as many parts of each dim        | shard              |
| psum         | pending axes are summed                             | 2 shard · (n-1)/n  |
| psum_scatter | pending axes are summed, and cut a dim further      | shard · (n-1)/n    |

Arrays may move over parts of axes: an axis of four devices is two of two. Where the shards are
multiplied they lie over whole axes.

A product of two shards is possible where contracted dims lie alike, batch dims lie alike and no
axis is on two dims; axes on contracted dims are pending in its result. Dims divide evenly
throughout.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, prod

Axes = tuple[str, ...]  # major to minor
Spec = tuple[Axes, ...]  # one entry a dim
Mesh = tuple[tuple[str, int], ...]  # axes and their sizes
Pairs = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Array:
    shape: tuple[int, ...]
    itemsize: int = 4


@dataclass(frozen=True)
class State:
    """Where an array lies, and the axes over which the devices' copies are yet to be summed."""

    spec: Spec
    pending: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Move:
    kind: str
    axes: Axes
    before: State
    after: State
    received: float  # bytes, by one device


@dataclass(frozen=True)
class Product:
    """A product on a mesh: dims of the result are the batch, lhs's free ones, rhs's free ones."""

    lhs: Array
    rhs: Array
    contracting: Pairs
    mesh: Mesh
    batch: Pairs = ((), ())
    out_itemsize: int = 4

    @property
    def out(self) -> Array:
        shape = self.to_out(self.lhs.shape, self.rhs.shape)
        return Array(shape, self.out_itemsize)

    def to_out(self, lhs: tuple, rhs: tuple) -> tuple:
        """What belongs to dims of the operands, in the order of the result's dims."""
        gone = [{*self.contracting[side], *self.batch[side]} for side in (0, 1)]
        return (
            *(lhs[i] for i in self.batch[0]),
            *(x for i, x in enumerate(lhs) if i not in gone[0]),
            *(x for j, x in enumerate(rhs) if j not in gone[1]),
        )


@dataclass(frozen=True)
class Local:
    """One way to multiply shards: layouts of the operands, state of the result, FLOPs a device."""

    lhs: Spec
    rhs: Spec
    out: State
    flops: float


def bound(
    product: Product, lhs: Spec, rhs: Spec, wanted: Spec | None = None, at_flops: float = inf
) -> float:
    """The fewest bytes that a device receives between operands in `lhs`, `rhs` and the result.

    Args:
      wanted: the layout of the result; None: any.
      at_flops: a device may compute no more than this.
    """
    fine = in_parts(product.mesh)
    from_lhs = cheapest(product.lhs, fine, parted(State(lhs), product.mesh))
    from_rhs = cheapest(product.rhs, fine, parted(State(rhs), product.mesh))
    least = inf
    for local in products(product):
        if local.flops > at_flops:
            continue
        moved = from_lhs[parted(State(local.lhs), product.mesh)][0]
        moved += from_rhs[parted(State(local.rhs), product.mesh)][0]
        if moved < least:
            least = min(least, moved + finished(product, local.out, wanted))
    return least


def finished(product: Product, out: State, wanted: Spec | None) -> float:
    """Bytes from the result of the local products to the wanted layout, or to the nearest one."""
    costs = cheapest(product.out, in_parts(product.mesh), parted(out, product.mesh))
    ends = layouts(product.out.shape, product.mesh) if wanted is None else (wanted,)
    return min(costs[parted(State(end), product.mesh)][0] for end in ends)


@cache
def in_parts(mesh: Mesh) -> Mesh:
    """The mesh with an axis for each prime factor of an axis, major to minor."""
    return tuple(
        (part, size)
        for axis, n in mesh
        for part, size in zip(_parts_of(axis, n), _primes(n), strict=True)
    )


@cache
def parted(state: State, mesh: Mesh) -> State:
    """The same state on the mesh of parts."""
    sizes = dict(mesh)
    spec = tuple(_axes(_parts_of(a, sizes[a]) for a in axes) for axes in state.spec)
    return State(spec, frozenset(_axes(_parts_of(a, sizes[a]) for a in state.pending)))


def _primes(n: int) -> tuple[int, ...]:
    first = next((d for d in range(2, n + 1) if n % d == 0), None)
    return () if first is None else (first, *_primes(n // first))


def _parts_of(axis: str, n: int) -> Axes:
    count = len(_primes(n))
    return (axis,) if count == 1 else tuple(f"{axis}[{i}]" for i in range(count))


@cache
def products(product: Product) -> tuple[Local, ...]:
    """Every pair of layouts whose shards can be multiplied where they lie."""
    sizes = dict(product.mesh)
    lhs_k, rhs_k = product.contracting
    lhs_batch, rhs_batch = product.batch
    work = 2 * prod(product.out.shape) * prod(product.lhs.shape[i] for i in lhs_k)
    found = []
    for lhs in layouts(product.lhs.shape, product.mesh):
        for rhs in layouts(product.rhs.shape, product.mesh):
            if any(lhs[i] != rhs[j] for i, j in zip(lhs_k, rhs_k, strict=True)):
                continue
            if any(lhs[i] != rhs[j] for i, j in zip(lhs_batch, rhs_batch, strict=True)):
                continue
            out = product.to_out(lhs, rhs)
            pending = _axes(lhs[i] for i in lhs_k)
            used = _axes(out) + pending
            if len(used) == len(set(used)):
                flops = work / prod(sizes[a] for a in used)
                found.append(Local(lhs, rhs, State(out, frozenset(pending)), flops))
    return tuple(found)


@cache
def cheapest(array: Array, mesh: Mesh, start: State) -> Mapping[State, tuple[float, Move | None]]:
    """Dijkstra: for each state that can be reached the bytes to it, and the last move there."""
    best: dict[State, tuple[float, Move | None]] = {start: (0.0, None)}
    done: set[State] = set()
    order = itertools.count()  # states have no order of their own
    edge = [(0.0, next(order), start)]
    while edge:
        cost, _, state = heapq.heappop(edge)
        if state in done:
            continue
        done.add(state)
        for move in moves(array, mesh, state):
            reached = cost + move.received
            if move.after not in best or reached < best[move.after][0]:
                best[move.after] = (reached, move)
                heapq.heappush(edge, (reached, next(order), move.after))
    return best


def path(array: Array, mesh: Mesh, start: State, end: State) -> list[Move]:
    """The moves of a cheapest way from `start` to `end`."""
    best, found = cheapest(array, mesh, start), []
    while (last := best[end][1]) is not None:
        found.append(last)
        end = last.before
    return found[::-1]


@cache
def moves(array: Array, mesh: Mesh, state: State) -> tuple[Move, ...]:
    """Every single move out of `state`."""
    return tuple(m for m in _moves(array, mesh, state) if divides(array.shape, mesh, m.after.spec))


def _moves(array: Array, mesh: Mesh, state: State) -> Iterator[Move]:
    sizes = dict(mesh)
    spec, pending = state.spec, state.pending
    shard = array.itemsize * prod(array.shape) / prod(sizes[a] for a in _axes(spec))

    def move(kind: str, axes: Axes, after: State, received: float) -> Move:
        return Move(kind, axes, state, after, received)

    for dim, axes in enumerate(spec):
        for axis in sizes:
            if axis not in _axes(spec) and axis not in pending:
                cut = _with(spec, dim, (*axes, axis))
                yield move("slice", (axis,), State(cut, pending), 0)
        for kept in range(len(axes)):
            leave = axes[kept:]
            n = prod(sizes[a] for a in leave)
            rest = _with(spec, dim, axes[:kept])
            yield move("all_gather", leave, State(rest, pending), shard * n * (n - 1) / n)
            for to in range(len(spec)):
                if to != dim:
                    after = State(_with(rest, to, rest[to] + leave), pending)
                    yield move("all_to_all", leave, after, shard * (n - 1) / n)
        for summed in _arrangements(pending):
            n = prod(sizes[a] for a in summed)
            after = State(_with(spec, dim, axes + summed), pending - {*summed})
            yield move("psum_scatter", summed, after, shard * (n - 1) / n)
    for summed in _arrangements(pending):
        n = prod(sizes[a] for a in summed)
        yield move("psum", summed, State(spec, pending - {*summed}), 2 * shard * (n - 1) / n)
    for other in layouts(array.shape, mesh):
        alike = _parts(other, sizes) == _parts(spec, sizes)
        if other != spec and alike and not pending & {*_axes(other)}:
            moving = tuple(dict.fromkeys(_axes(spec) + _axes(other)))
            yield move("ppermute", moving, State(other, pending), shard)


@cache
def layouts(shape: tuple[int, ...], mesh: Mesh) -> tuple[Spec, ...]:
    """Every layout of an array: any axes on any dims in any order, where they divide."""
    found = []
    for used in [(), *_arrangements(frozenset(dict(mesh)))]:
        # An order of the axes, and where in it each dim but the first begins.
        for begins in itertools.combinations_with_replacement(range(len(used) + 1), len(shape) - 1):
            ends = (*begins, len(used))
            spec = tuple(used[a:b] for a, b in zip((0, *begins), ends, strict=True))
            if divides(shape, mesh, spec):
                found.append(spec)
    return tuple(found)


def divides(shape: tuple[int, ...], mesh: Mesh, spec: Spec) -> bool:
    """Whether `spec` cuts each dim into equal parts."""
    parts = _parts(spec, dict(mesh))
    return all(size % n == 0 for size, n in zip(shape, parts, strict=True))


def _arrangements(axes: frozenset[str]) -> list[Axes]:
    """Every choice of at least one of `axes`, in every order."""
    return [
        chosen
        for count in range(1, len(axes) + 1)
        for chosen in itertools.permutations(sorted(axes), count)
    ]


def _parts(spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(prod(sizes[a] for a in axes) for axes in spec)


def _axes(spec: Iterator[Axes] | Spec) -> Axes:
    return tuple(a for axes in spec for a in axes)


def _with(spec: Spec, dim: int, axes: Axes) -> Spec:
    return (*spec[:dim], axes, *spec[dim + 1 :])
