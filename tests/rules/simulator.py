"""A mesh in numpy: shards, sums and scatters carried out on host arrays, device by device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from shardops.rules.reduction import Reduction
from shardops.rules.spec import Axes, Spec

Device = tuple[int, ...]
Shards = dict[Device, np.ndarray]


class Mesh:
    """Named axes with sizes; a device is its coordinates along them."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self.names = tuple(sizes)
        self.devices = tuple(itertools.product(*(range(n) for n in sizes.values())))

    def part(self, device: Device, axes: Axes) -> tuple[int, int]:
        """Which of how many parts of a dim sharded over `axes` lies on `device`."""
        index = 0
        for a in axes:
            index = index * self.sizes[a] + device[self.names.index(a)]
        return index, prod(self.sizes[a] for a in axes)

    def slice(self, array: np.ndarray, spec: Spec, device: Device) -> np.ndarray:
        """The shard of `array` on `device`."""
        where = []
        for size, axes in zip(array.shape, spec, strict=True):
            index, parts = self.part(device, axes)
            assert size % parts == 0, (array.shape, spec)
            step = size // parts
            where.append(slice(index * step, (index + 1) * step))
        return array[tuple(where)]

    def groups(self, axes: Axes) -> Iterator[tuple[Device, ...]]:
        """Devices that differ along `axes` only, in the order of these axes, major to minor."""
        rest = [a for a in self.names if a not in axes]
        for fixed in itertools.product(*(range(self.sizes[a]) for a in rest)):
            group = []
            for moving in itertools.product(*(range(self.sizes[a]) for a in axes)):
                at = dict(zip(rest, fixed, strict=True)) | dict(zip(axes, moving, strict=True))
                group.append(tuple(at[a] for a in self.names))
            yield tuple(group)

    def reduce(self, shards: Shards, reduction: Reduction) -> Shards:
        """What `reduction` leaves on each device."""
        for dim, axes in reduction.scatter:
            new: Shards = {}
            for group in self.groups(axes):
                total = sum(shards[d] for d in group)
                for d, part in zip(group, np.split(total, len(group), dim), strict=True):
                    new[d] = part
            shards = new
        if reduction.all_reduce:
            new = {}
            for group in self.groups(reduction.all_reduce):
                total = sum(shards[d] for d in group)
                new |= dict.fromkeys(group, total)
            shards = new
        return shards


def all_specs(ndim: int, axes: Sequence[str]) -> list[Spec]:
    """Every way to put a subset of `axes` on `ndim` dims, in every order."""
    specs = set()
    for places in itertools.product(range(-1, ndim), repeat=len(axes)):
        for order in itertools.permutations(range(len(axes))):
            spec: list[list[str]] = [[] for _ in range(ndim)]
            for n in order:
                if places[n] >= 0:
                    spec[places[n]].append(axes[n])
            specs.add(tuple(tuple(d) for d in spec))
    return sorted(specs)


def uses_axes_once(spec: Spec) -> bool:
    """Whether no mesh axis shards two dims."""
    flat = [a for d in spec for a in d]
    return len(flat) == len(set(flat))
