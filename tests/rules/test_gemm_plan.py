"""plan_gemm against a mesh simulated in numpy: every sharding of small products, random ones on
more axes. The layouts with names are in test_gemm_layouts.py."""

import itertools
import random
from math import prod

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardops.rules import plan_gemm
from shardops.rules.gemm import plan, predictable
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.spec import axes_in, divisible
from tests.rules.simulated_products import check_product, random_product
from tests.rules.simulator import Mesh, all_specs, random_spec

TWO = Mesh({"a": 2, "b": 2})
THREE = Mesh({"a": 2, "b": 3, "c": 2})
FOUR = Mesh({"a": 2, "b": 3, "c": 2, "d": 2})
FIVE = Mesh({"a": 2, "b": 3, "one": 1, "c": 2, "d": 2, "e": 2})
MESHES = {"three": THREE, "four": FOUR, "five": FIVE}
on_meshes = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


@pytest.mark.parametrize(
    "shape", [(4, 4, 4), (4, 6, 4), (6, 2, 4), (1, 4, 3), (4, 0, 4), (0, 4, 4)]
)
def test_plan_matrices_every_sharding(shape):
    m, k, n = shape
    rng = np.random.default_rng(0)
    dims = GemmDims((m, k), (k, n), (1,), (0,))
    specs = all_specs(2, "ab")
    for lhs, rhs, want in itertools.product(specs, specs, [None, "cheapest", *specs]):
        check_product(TWO, dims, lhs, rhs, want, rng=rng)


@on_meshes
@pytest.mark.parametrize("seed", range(2))
def test_plan_random_products(mesh, seed):
    """Several contracting, free and true batch dims in any place."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    for _ in range(80):
        dims = random_product(rng)
        lhs = random_spec(rng, len(dims.lhs_shape), mesh.names)
        rhs = random_spec(rng, len(dims.rhs_shape), mesh.names)
        out = random_spec(rng, len(dims.out_shape), mesh.names)
        check_product(mesh, dims, lhs, rhs, rng.choice((None, "cheapest", out)), rng=numbers)


@on_meshes
@pytest.mark.parametrize("seed", range(2))
def test_plan_of_operands_that_lie_in_several_places(mesh, seed):
    """The steps begin at one of them, and cost no more than from the first alone."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    started_elsewhere = 0
    for _ in range(40):
        dims = random_product(rng)
        lhs, rhs = (
            [divisible(s, random_spec(rng, len(s), mesh.names), mesh.sizes.items()) for _ in "abc"]
            for s in (dims.lhs_shape, dims.rhs_shape)
        )
        also = {"lhs_also": tuple(lhs[1:]), "rhs_also": tuple(rhs[1 : 1 + rng.randint(0, 2)])}
        wanted = rng.choice((None, random_spec(rng, len(dims.out_shape), mesh.names)))
        made = check_product(mesh, dims, lhs[0], rhs[0], wanted, rng=numbers, **also)
        if made.of("lhs"):
            started_elsewhere += made.of("lhs")[0].before != lhs[0]
    assert started_elsewhere


def asked_to_stay_open(mesh, rng):
    """A product, the axes over which its sum is to stay open, and shardings."""
    dims = random_product(rng, sizes=(2, 4, 6, 12), most=4)
    axes = rng.sample([a for a in mesh.names if a != "one"], rng.randint(1, 2))
    lhs = random_spec(rng, len(dims.lhs_shape), mesh.names)
    rhs = random_spec(rng, len(dims.rhs_shape), mesh.names)
    rest = [a for a in mesh.names if a not in axes]
    wanted = rng.choice((None, random_spec(rng, len(dims.out_shape), rest)))
    return dims, tuple(axes), lhs, rhs, wanted


@on_meshes
@pytest.mark.parametrize("seed", range(2))
def test_plan_leaves_sums_open(mesh, seed):
    """All that were asked for, where contracting dims have room for them; else none."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    opened = 0
    for _ in range(50):
        dims, axes, lhs, rhs, wanted = asked_to_stay_open(mesh, rng)
        made = check_product(mesh, dims, lhs, rhs, wanted, rng=numbers, unreduced=axes)
        assert made.unreduced in ((), axes)
        opened += made.unreduced == axes
        target = wanted
        if target is None:
            taken = (
                divisible(s, spec, mesh.sizes.items())
                for s, spec in ((dims.lhs_shape, lhs), (dims.rhs_shape, rhs))
            )
            target = predictable(dims, *taken)
        parts = prod(mesh.sizes[a] for a in axes)
        room = any(dims.lhs_shape[i] % parts == 0 for i in dims.lhs_k)
        if room and not {*axes} & {*axes_in(target)}:
            assert made.unreduced == axes, (dims, axes, lhs, rhs, wanted)
    assert opened > 5


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 6, 2)])
def test_plan_matrices_leave_sums_open_from_every_sharding(shape):
    m, k, n = shape
    rng, dims = np.random.default_rng(0), GemmDims((m, k), (k, n), (1,), (0,))
    specs = all_specs(2, "ab")
    for lhs, rhs, want in itertools.product(specs, specs, all_specs(2, "b")):
        made = check_product(TWO, dims, lhs, rhs, want, rng=rng, unreduced=("a",))
        assert made.unreduced == ("a",)


def test_plan_does_not_move_the_result_over_an_axis_whose_sum_stays_open():
    """Devices along `a` hold different parts of the sum: none of them is idle there."""
    mesh, dims = Mesh({"a": 2, "b": 2, "c": 2}), GemmDims((4,), (4, 4), (0,), (0,))
    shardings = ((),), ((), ("c",)), (("b",),)
    made = check_product(mesh, dims, *shardings, rng=np.random.default_rng(0), unreduced=("a",))
    assert made.unreduced == ("a",)


@pytest.mark.parametrize("seed", range(2))
def test_plan_cuts_contracting_and_free_dims_into_whole_blocks(seed):
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    for _ in range(80):
        dims = random_product(rng, sizes=(4, 6, 12), most=4)
        blocks = [
            tuple(rng.choice((1, 2, 3)) for _ in shape)
            for shape in (dims.lhs_shape, dims.rhs_shape)
        ]
        lhs, rhs = (random_spec(rng, len(s), "abc") for s in (dims.lhs_shape, dims.rhs_shape))
        options = {"lhs_block": blocks[0], "rhs_block": blocks[1]}
        made = check_product(THREE, dims, lhs, rhs, "cheapest", rng=numbers, **options)
        for spec, scale, shape, block in (
            (made.lhs, made.lhs_scale, dims.lhs_shape, blocks[0]),
            (made.rhs, made.rhs_scale, dims.rhs_shape, blocks[1]),
        ):
            assert scale == (spec if block else None)
            for axes, size, unit in zip(spec, shape, block, strict=True):
                parts = prod(THREE.sizes[a] for a in axes)
                assert parts == 1 or size % (parts * unit) == 0, (made, block)


def test_plan_bytes_follow_the_sizes_of_elements():
    """Where halves are multiplied and summed in float32, the sum costs twice the bytes."""
    dims = GemmDims((512, 4096), (4096, 512), (1,), (0,))
    halves, floats = (
        plan(dims, ((), ("b",)), (("b",), ()), (("b", 2),), itemsizes=(2, 2, size))
        for size in (2, 4)
    )
    assert [s.kind for s in halves.steps] == [s.kind for s in floats.steps] == ["psum"]
    assert floats.bytes == 2 * halves.bytes == 2 * 2 * 2 * 512 * 512 / 2


def test_plan_is_remembered():
    def forward():
        shapes = {"contracting_dims": ((1,), (0,)), "batch_dims": ((0,), ())}
        return plan_gemm((64, 128), (128, 256), P("a"), P(), {"a": 2, "b": 2}, **shapes)

    assert forward() is forward()
