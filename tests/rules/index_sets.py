"""Devices that hold sets of an array's elements: the moves of the brute-force bound, carried out.

A device holds {index of an element: the partial sums of it that it has}. Collectives run as their
ring algorithms do, one neighbour to the next, and what a device receives is counted by element.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.rules.brute_force import Axes, Mesh, Move, State

Device = tuple[int, ...]
Block = dict[tuple[int, ...], frozenset[Device]]
Held = dict[Device, Block]


class Devices:
    """A mesh of devices. A partial sum is named by the device's place along `summed`."""

    def __init__(self, mesh: Mesh, shape: Sequence[int], summed: frozenset[str]):
        self.sizes, self.names, self.shape = dict(mesh), [name for name, _ in mesh], tuple(shape)
        self.all = list(itertools.product(*(range(n) for n in self.sizes.values())))
        self.summed = [i for i, name in enumerate(self.names) if name in summed]

    def holding(self, state: State) -> Held:
        """What each device holds of an array in `state`."""
        return {device: self._block(device, state) for device in self.all}

    def _block(self, device: Device, state: State) -> Block:
        ranges = []
        for size, axes in zip(self.shape, state.spec, strict=True):
            at, parts = 0, 1
            for axis in axes:
                at = at * self.sizes[axis] + device[self.names.index(axis)]
                parts *= self.sizes[axis]
            ranges.append(range(at * size // parts, (at + 1) * size // parts))
        still = {i for i in self.summed if self.names[i] in state.pending}
        sums = frozenset(
            sums
            for sums in itertools.product(*(range(self.sizes[self.names[i]]) for i in self.summed))
            if all(
                place == device[i] for place, i in zip(sums, self.summed, strict=True) if i in still
            )
        )
        return dict.fromkeys(itertools.product(*ranges), sums)

    def run(self, held: Held, move: Move) -> tuple[Held, int]:
        """What the devices hold after a move, and the most elements that one of them received."""
        target = self.holding(move.after)
        received: Counter[Device] = Counter()
        if move.kind == "slice":
            return {d: _only(held[d], target[d]) for d in self.all}, 0
        if move.kind == "ppermute":
            return self._permute(held, target, received), max(received.values(), default=0)
        after: Held = {}
        for group in self._groups(move.axes):
            blocks = [held[d] for d in group]
            if move.kind == "all_gather":
                got = _ring_gather(blocks, _counted(received, group))
            elif move.kind == "all_to_all":
                got = _exchange(blocks, [target[d] for d in group], _counted(received, group))
            elif move.kind == "psum_scatter":
                chunks = [list(target[d]) for d in group]
                got = _ring_scatter(blocks, chunks, _counted(received, group))
            else:
                chunks = _equal_chunks(list(blocks[0]), len(group))
                pieces = _ring_scatter(blocks, chunks, _counted(received, group))
                got = _ring_gather(pieces, _counted(received, group))
            after |= dict(zip(group, got, strict=True))
        return after, max(received.values(), default=0)

    def _groups(self, axes: Axes) -> Iterator[list[Device]]:
        """Devices that differ along `axes` alone, in the order of these, major to minor."""
        places = [self.names.index(a) for a in axes]
        groups: dict[Device, list[Device]] = {}
        for device in sorted(self.all, key=lambda d: [d[i] for i in places]):
            rest = tuple(x for i, x in enumerate(device) if i not in places)
            groups.setdefault(rest, []).append(device)
        return iter(groups.values())

    def _permute(self, held: Held, target: Held, received: Counter) -> Held:
        """Each device sends its whole block to one device at most, and keeps what it can."""
        after: Held = {}
        senders = list(self.all)
        for device in self.all:
            if held[device] == target[device]:
                after[device] = held[device]
                senders.remove(device)
        for device in self.all:
            if device not in after:
                sender = next(s for s in senders if held[s] == target[device])
                senders.remove(sender)
                after[device] = held[sender]
                received[device] += len(held[sender])
        return after


def _counted(received: Counter, group: Sequence[Device]) -> Callable[[int, Mapping], None]:
    def count(member: int, block: Mapping) -> None:
        received[group[member]] += len(block)

    return count


def _ring_gather(blocks: list[Block], count: Callable[[int, Mapping], None]) -> list[Block]:
    """n - 1 times each device passes on what it received last, its own block first."""
    n, held, last = len(blocks), [dict(b) for b in blocks], list(blocks)
    for _ in range(n - 1):
        last = [last[i - 1] for i in range(n)]
        for i in range(n):
            assert not held[i].keys() & last[i].keys()
            held[i] |= last[i]
            count(i, last[i])
    return held


def _ring_scatter(
    blocks: list[Block], chunks: list[list], count: Callable[[int, Mapping], None]
) -> list[Block]:
    """n - 1 times each device passes on a sum so far, to which the next one adds its own part."""
    n = len(blocks)
    held = [[{i: block[i] for i in chunk} for chunk in chunks] for block in blocks]
    for step in range(n - 1):
        sent = [held[i][(i - 1 - step) % n] for i in range(n)]
        for i in range(n):
            mine, theirs = held[i][(i - 2 - step) % n], sent[i - 1]
            count(i, theirs)
            for index, sums in theirs.items():
                assert not mine[index] & sums  # nothing is added twice
                mine[index] |= sums
    return [held[i][i] for i in range(n)]


def _exchange(
    blocks: list[Block], targets: list[Block], count: Callable[[int, Mapping], None]
) -> list[Block]:
    after = []
    for i, target in enumerate(targets):
        new: Block = {}
        for j, block in enumerate(blocks):
            piece = _only(block, target)
            new |= piece
            if j != i:
                count(i, piece)
        after.append(new)
    return after


def _equal_chunks(indices: list, n: int) -> list[list]:
    assert len(indices) % n == 0
    size = len(indices) // n
    return [indices[i * size : (i + 1) * size] for i in range(n)]


def _only(block: Block, of: Mapping) -> Block:
    return {i: sums for i, sums in block.items() if i in of}
