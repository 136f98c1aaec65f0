"""Ways from one sharding to another, on the simulated mesh: every pair on two and three axes."""

import itertools
import random
from math import prod

import numpy as np
import pytest

from shardops.moving import permutation
from shardops.rules.moves import move, sum_and_move, sum_first
from shardops.rules.parts import axis_of
from shardops.rules.spec import axes_in, divisible, shards
from tests.rules.simulator import Mesh, all_specs, check_steps, random_spec

TWO = Mesh({"a": 2, "b": 4})
UNEVEN = Mesh({"a": 2, "one": 1, "b": 3})
THREE = Mesh({"a": 2, "b": 2, "c": 2})
FOUR = Mesh({"a": 2, "b": 2, "c": 2, "d": 3})
FIVE = Mesh({"a": 2, "b": 2, "c": 2, "d": 3, "e": 2})
ITEMSIZE = 2


def specs_of(mesh, shape):
    """All shardings that divide an array, without axes of one device."""
    axis_sizes = tuple(mesh.sizes.items())
    return sorted({divisible(shape, s, axis_sizes) for s in all_specs(len(shape), mesh.names)})


def random_specs(mesh, shape, rng, count):
    axis_sizes = tuple(mesh.sizes.items())
    return [
        divisible(shape, random_spec(rng, len(shape), mesh.names, 0.9), axis_sizes)
        for _ in range(count)
    ]


def check_move(mesh, shape, have, want):
    """The steps are right, and move no more than gathering what changes and cutting it."""
    steps = move(shape, have, want, tuple(mesh.sizes.items()), ITEMSIZE, "x")
    check_steps(steps, shape, have, want, mesh.sizes, ITEMSIZE)
    assert all(s.array == "x" for s in steps)
    array = np.arange(prod(shape)).reshape(shape)
    got, end = mesh.carry_out(mesh.place(array, have), steps), mesh.place(array, want)
    for device in mesh.devices:
        np.testing.assert_array_equal(got[device], end[device], str((have, want, steps)))
    whole = ITEMSIZE * prod(shape)
    gathered = whole * (1 - 1 / shards(axes_in(have), mesh.sizes))
    assert sum(s.bytes for s in steps) <= gathered * 1.000001, (have, want, steps)
    return steps


def check_sum(way, mesh, shape, have, pending, want, left):
    """Partial sums that differ along `pending`; those along `left` stay apart."""
    rest = (left,) if way is sum_and_move else ()
    steps = way(shape, have, pending, want, *rest, tuple(mesh.sizes.items()), ITEMSIZE, "x")
    case = str((way.__name__, shape, have, pending, want, left, steps))
    check_steps(steps, shape, have, want, mesh.sizes, ITEMSIZE)
    over = [a for s in steps if s.kind in ("psum", "psum_scatter") for a in s.axes]
    assert {*map(axis_of, over)} - {"one"} == {*pending} - {*left, "one"}, case
    assert len(over) == len({*over}), case
    array = np.arange(prod(shape)).reshape(shape)

    def partial(axes, device):  # a sum over all axes is the sum over each of them
        return array * prod(1 + mesh.part(device, (a,))[0] for a in axes)

    def total(axes):
        return prod(sum(range(1, 1 + mesh.sizes[a])) for a in axes)

    local = {d: mesh.slice(partial(pending, d), have, d) for d in mesh.devices}
    summed = total([a for a in pending if a not in left])
    for device, got in mesh.carry_out(local, steps).items():
        end = mesh.slice(partial(left, device) * summed, want, device)
        np.testing.assert_array_equal(got, end, case)
    return steps


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        pytest.param(mesh, shape, id=f"{len(mesh.names)} axes {shape}")
        for mesh, shapes in (
            (TWO, [(8,), (8, 8), (8, 4), (6, 4), (2, 4, 8), (0, 8), (3, 5)]),
            (UNEVEN, [(6, 6), (12, 2), (6, 4)]),
            (THREE, [(8,), (4, 8)]),
        )
        for shape in shapes
    ],
)
def test_move_every_pair_of_shardings(mesh, shape):
    for have, want in itertools.product(specs_of(mesh, shape), repeat=2):
        check_move(mesh, shape, have, want)


@pytest.mark.parametrize("seed", range(2))
def test_move_of_many_dims_on_three_axes(seed):
    rng = random.Random(seed)
    for _ in range(60):
        shape = tuple(rng.choice((1, 2, 3, 4, 8)) for _ in range(rng.randint(3, 6)))
        check_move(THREE, shape, *random_specs(THREE, shape, rng, 2))


@pytest.mark.parametrize("mesh", [FOUR, FIVE], ids=["four", "five"])
def test_move_on_many_axes(mesh):
    rng = random.Random(0)
    changing = set()
    for _ in range(150):
        shape = tuple(rng.choice((4, 6, 12, 24)) for _ in range(rng.randint(1, 3)))
        have, want = random_specs(mesh, shape, rng, 2)
        check_move(mesh, shape, have, want)
        changing.add(sum(x != y for x, y in zip(have, want, strict=True)))
    assert changing >= {1, 2, 3}


def test_move_takes_the_one_collective_that_there_is():
    def kinds(shape, have, want):
        return [s.kind for s in check_move(TWO, shape, have, want)]

    a, b, both, none = ("a",), ("b",), ("a", "b"), ()
    assert kinds((8, 8), (b, none), (b, none)) == []
    assert kinds((8, 8), (none, none), (both, none)) == ["slice"]
    assert kinds((8, 8), (both, none), (a, none)) == ["all_gather"]
    assert kinds((8, 8), (b, none), (none, b)) == ["all_to_all"]
    assert kinds((8, 8), (both, none), (a, b)) == ["all_to_all"]
    assert kinds((8, 8), (both, none), (("b", "a"), none)) == ["ppermute"]
    assert kinds((8, 8), (a, b), (a, none)) == ["all_gather"]
    # The major axis leaves: what stays has to change places first.
    assert kinds((8, 8), (both, none), (b, none)) == ["ppermute", "all_gather"]


def test_move_on_many_axes_searches_those_that_change():
    """Three axes change on a mesh of five; what stays on the dims does not count."""
    have = (("a", "b"), ("c", "e"))
    want = (("a",), ("c", "e", "b"))
    [step] = check_move(FIVE, (24, 24), have, want)
    assert (step.kind, step.axes) == ("all_to_all", ("b",))


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [(TWO, (8,)), (TWO, (8, 4)), (TWO, (6, 8)), (UNEVEN, (6, 4)), (THREE, (8, 4)), (TWO, (0, 4))],
    ids=["vector", "matrix", "uneven", "one", "three", "empty"],
)
@pytest.mark.parametrize("way", [sum_and_move, sum_first])
def test_sum_every_pair_of_shardings(way, mesh, shape):
    rng = random.Random(0)
    cases = []
    for have in specs_of(mesh, shape):
        idle = [a for a in mesh.names if a not in axes_in(have)]
        for count in range(len(idle) + 1):
            for pending in itertools.combinations(idle, count):
                for left in itertools.chain(*(itertools.combinations(pending, n) for n in (0, 1))):
                    if left and way is sum_first:
                        continue
                    ends = [w for w in specs_of(mesh, shape) if not {*axes_in(w)} & {*left}]
                    cases += [(have, pending, want, left) for want in ends]
    for case in rng.sample(cases, min(len(cases), 400)):
        check_sum(way, mesh, shape, *case)


@pytest.mark.parametrize("mesh", [FOUR, FIVE], ids=["four", "five"])
@pytest.mark.parametrize("way", [sum_and_move, sum_first])
def test_sum_on_many_axes(way, mesh):
    rng = random.Random(0)
    for _ in range(120):
        shape = tuple(rng.choice((4, 6, 12, 24)) for _ in range(rng.randint(1, 3)))
        pending = tuple(rng.sample(mesh.names, rng.randint(0, 4)))
        left = pending[: rng.randint(0, len(pending))] if way is sum_and_move else ()
        have, want = random_specs(mesh, shape, rng, 2)
        have = tuple(tuple(a for a in d if a not in pending) for d in have)
        want = tuple(tuple(a for a in d if a not in left) for d in want)
        axis_sizes = tuple(mesh.sizes.items())
        have, want = (divisible(shape, s, axis_sizes) for s in (have, want))
        check_sum(way, mesh, shape, have, pending, want, left)


def test_sum_scatters_where_its_axes_are_wanted():
    none = ((), ())
    [step] = check_sum(sum_and_move, TWO, (8, 8), none, ("a", "b"), (("a", "b"), ()), ())
    assert (step.kind, step.axes, step.dim) == ("psum_scatter", ("a", "b"), 0)
    [step] = check_sum(sum_and_move, TWO, (8, 8), none, ("a", "b"), none, ())
    assert (step.kind, step.axes) == ("psum", ("a", "b"))
    # Half of an all-reduce, and no gather after: the axes are wanted on both dims.
    steps = check_sum(sum_and_move, TWO, (8, 8), none, ("a", "b"), (("a",), ("b",)), ())
    assert {s.kind for s in steps} == {"psum_scatter"}
    [step] = check_sum(sum_and_move, TWO, (8, 8), none, ("a", "b"), (("a",), ()), ("b",))
    assert (step.kind, step.axes) == ("psum_scatter", ("a",))


@pytest.mark.parametrize("mesh", [TWO, UNEVEN, THREE], ids=["two", "uneven", "three"])
def test_permutation_sends_and_receives_once(mesh):
    """Between layouts with as many parts; what a device needs and has does not travel."""
    shape = (24, 24)
    alike = {}
    for spec in specs_of(mesh, shape):
        alike.setdefault(tuple(shards(d, mesh.sizes) for d in spec), []).append(spec)
    for before, after in itertools.chain(*(itertools.product(v, repeat=2) for v in alike.values())):
        axes = tuple(a for a in mesh.names if a in axes_in(before) + axes_in(after))
        pairs = permutation(before, after, axes, mesh.sizes)
        everyone = list(range(shards(axes, mesh.sizes)))
        assert sorted(s for s, _ in pairs) == sorted(d for _, d in pairs) == everyone
        array = np.arange(prod(shape)).reshape(shape)
        for group in mesh.groups(axes):
            for source, to in pairs:
                sent = mesh.slice(array, before, group[source])
                np.testing.assert_array_equal(sent, mesh.slice(array, after, group[to]))
            for n, device in enumerate(group):
                if np.array_equal(
                    mesh.slice(array, before, device), mesh.slice(array, after, device)
                ):
                    assert (n, n) in pairs
