"""A mesh in numpy: the steps of a plan carried out on host arrays, device by device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
import pytest

from shardops.moving import permutation
from shardops.rules.parts import axis_of, coordinate, factors, size_of
from shardops.rules.spec import Axes, Spec, local_shape
from shardops.rules.step import Step

Device = tuple[int, ...]
Shards = dict[Device, np.ndarray]


class Mesh:
    """Named axes with sizes; a device is its coordinates along them."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self.names = tuple(sizes)
        self.devices = tuple(itertools.product(*(range(n) for n in sizes.values())))
        self._groups: dict[Axes, list[tuple[Device, ...]]] = {}

    def part(self, device: Device, axes: Axes) -> tuple[int, int]:
        """Which of how many parts of a dim sharded over `axes` lies on `device`."""
        index = 0
        for a in axes:
            index = index * size_of(a, self.sizes) + self._at(device, a)
        return index, prod(size_of(a, self.sizes) for a in axes)

    def _at(self, device: Device, axis: str) -> int:
        """Where a device is along an axis or a part of one."""
        return coordinate(axis, device[self.names.index(axis_of(axis))], self.sizes)

    def slice(self, array: np.ndarray, spec: Spec, device: Device) -> np.ndarray:
        """The shard of `array` on `device`."""
        where = []
        for size, axes in zip(array.shape, spec, strict=True):
            index, parts = self.part(device, axes)
            assert size % parts == 0, (array.shape, spec)
            step = size // parts
            where.append(slice(index * step, (index + 1) * step))
        return array[tuple(where)]

    def place(self, array: np.ndarray, spec: Spec) -> Shards:
        """The shards of `array` on all devices."""
        return {d: self.slice(array, spec, d) for d in self.devices}

    def groups(self, axes: Axes) -> list[tuple[Device, ...]]:
        """Devices that differ along `axes` only, in the order of these axes, major to minor."""
        if axes not in self._groups:
            found: dict[Device, list[Device]] = {}
            others = [
                part
                for a, n in self.sizes.items()
                if a not in axes
                for part in ([a] if len(factors(n)) < 2 else _parts(a, n))
                if part not in axes
            ]
            for device in sorted(self.devices, key=lambda d: [self._at(d, a) for a in axes]):
                rest = tuple(self._at(device, a) for a in others)
                found.setdefault(rest, []).append(device)
            self._groups[axes] = [tuple(group) for group in found.values()]
        return self._groups[axes]

    def carry_out(self, shards: Shards, steps: Iterable[Step]) -> Shards:
        """What each device holds after the steps."""
        for step in steps:
            after: Shards = {}
            axes = step.axes
            if step.kind == "ppermute":  # devices are counted along whole axes
                axes = tuple(dict.fromkeys(map(axis_of, axes)))
            for group in self.groups(axes):
                held = [shards[d] for d in group]
                after |= dict(zip(group, self._together(held, step), strict=True))
            shards = after
        return shards

    def _together(self, held: list[np.ndarray], step: Step) -> Sequence[np.ndarray]:
        """One step by a group of devices."""
        n = len(held)
        match step.kind:
            case "slice":
                return [np.split(x, n, step.dim)[i] for i, x in enumerate(held)]
            case "all_gather":
                return [np.concatenate(held, step.dim)] * n
            case "all_to_all":
                cut = [np.split(x, n, step.to_dim) for x in held]
                return [np.concatenate([c[i] for c in cut], step.dim) for i in range(n)]
            case "ppermute":
                pairs = permutation(step.before, step.after, step.axes, self.sizes)
                source = {to: x for x, to in pairs}
                assert len({x for x, _ in pairs}) == len(source) == len(pairs) == n, step
                return [held[source[i]] for i in range(n)]
            case "psum":
                return [sum(held, np.zeros_like(held[0]))] * n
            case "psum_scatter":
                return np.split(sum(held, np.zeros_like(held[0])), n, step.dim)


def check_steps(
    steps: Sequence[Step],
    shape: Sequence[int],
    start: Spec,
    end: Spec,
    sizes: Mapping[str, int],
    itemsize: float,
) -> None:
    """Steps join, from `start` to `end`, have an axis once, and cost what ring algorithms cost.

    Axes of one device are left out of account.
    """
    big = {a for a, n in sizes.items() if n > 1}
    sizes = {**sizes, **{p: size_of(p, sizes) for a, n in sizes.items() for p in _parts(a, n)}}
    now = _only(start, big)
    for step in steps:
        assert _only(step.before, big) == now, (step, now)
        assert uses_axes_once(step.after), step
        now = _only(step.after, big)
        assert step.bytes == pytest.approx(itemsize * ring_elements(step, shape, sizes)), step
    assert now == _only(end, big), (steps, end)


def ring_elements(step: Step, shape: Sequence[int], sizes: Mapping[str, int]) -> float:
    """What a device receives in a step."""
    n = prod(sizes[a] for a in step.axes)
    before, after = (prod(local_shape(shape, s, sizes)) for s in (step.before, step.after))
    match step.kind:
        case "slice":
            return 0
        case "all_gather":
            return after * (n - 1) / n
        case "ppermute":
            return before
        case "psum":
            return 2 * before * (n - 1) / n
        case _:
            return before * (n - 1) / n


def _parts(axis: str, n: int) -> list[str]:
    return [f"{axis}[{i}]" for i in range(len(factors(n)))]


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


def random_spec(rng: random.Random, ndim: int, axes: Sequence[str], used: float = 0.75) -> Spec:
    """Some of `axes` on any dims in any order; an axis is used with probability `used`."""
    spec: list[list[str]] = [[] for _ in range(ndim)]
    for axis in rng.sample(list(axes), len(axes)):
        if ndim and rng.random() < used:
            spec[rng.randrange(ndim)].append(axis)
    return tuple(tuple(d) for d in spec)


def uses_axes_once(spec: Spec) -> bool:
    """Whether no mesh axis shards two dims."""
    flat = [a for d in spec for a in d]
    return len(flat) == len(set(flat))


def _only(spec: Spec, axes: set[str]) -> Spec:
    return tuple(tuple(a for a in d if axis_of(a) in axes) for d in spec)
