"""Plans of products carried out on a mesh in numpy, and what has to hold of each."""

import random
from collections.abc import Sequence
from math import prod

import numpy as np
import pytest

from shardops.rules import Plan
from shardops.rules.gemm import plan
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.gemm_search import SLACK, operations
from shardops.rules.hardware import DEFAULT
from shardops.rules.spec import Spec, axes_in, divisible, shards
from shardops.rules.step import Step
from tests.rules.simulator import Mesh, Shards, check_steps, uses_axes_once

ITEMSIZES = (2, 2, 4)


def check_product(
    mesh: Mesh,
    dims: GemmDims,
    lhs_spec: Spec,
    rhs_spec: Spec,
    wanted=None,
    *,
    rng: np.random.Generator,
    lhs_also: tuple[Spec, ...] = (),
    rhs_also: tuple[Spec, ...] = (),
    **options,
) -> Plan:
    """Plan a product, carry it out from all shardings of its operands, and check all that holds.

    Where operands are to be had in several shardings, the steps may begin at any of them.
    """
    axis_sizes = tuple(mesh.sizes.items())
    made = plan(
        dims,
        lhs_spec,
        rhs_spec,
        axis_sizes,
        wanted,
        itemsizes=ITEMSIZES,
        lhs_also=lhs_also,
        rhs_also=rhs_also,
        **options,
    )
    case = (dims, lhs_spec, rhs_spec, wanted, lhs_also, rhs_also, options, made)
    arrays = [rng.integers(-9, 9, shape) for shape in (dims.lhs_shape, dims.rhs_shape)]
    offered = [
        [divisible(x.shape, spec, axis_sizes) for spec in specs]
        for x, specs in zip(arrays, ((lhs_spec, *lhs_also), (rhs_spec, *rhs_also)), strict=True)
    ]
    try:
        _check_form(mesh, dims, made, wanted)
        _check_values(mesh, dims, made, arrays, offered)
        if not made.unreduced:
            assert seconds(made) <= (1 + SLACK) * 1.0001 * _gathering(mesh, dims, offered)
    except AssertionError as error:
        error.add_note(f"{case}")
        raise
    return made


def seconds(made: Plan) -> float:
    """What a plan costs in the model."""
    return made.bytes / DEFAULT.bandwidth + made.flops / DEFAULT.peak


def _gathering(mesh: Mesh, dims: GemmDims, offered: Sequence[Sequence[Spec]]) -> float:
    """What gathering both operands and multiplying everything everywhere costs."""
    moved = 0.0
    for shape, specs, size in zip(
        (dims.lhs_shape, dims.rhs_shape), offered, ITEMSIZES[:2], strict=True
    ):
        missing = min(1 - 1 / shards(axes_in(s), mesh.sizes) for s in specs)
        moved += size * prod(shape) * missing
    return moved / DEFAULT.bandwidth + operations(dims) / DEFAULT.peak


def _check_values(
    mesh: Mesh,
    dims: GemmDims,
    made: Plan,
    arrays: Sequence[np.ndarray],
    offered: Sequence[Sequence[Spec]],
) -> None:
    held: list[Shards] = []
    for n, name in enumerate(("lhs", "rhs")):
        steps, end = made.of(name), made.operands[n]
        start = steps[0].before if steps else end
        assert start in offered[n], (start, offered[n])
        check_steps(steps, arrays[n].shape, start, end, mesh.sizes, ITEMSIZES[n])
        held.append(mesh.carry_out(mesh.place(arrays[n], start), steps))
    equation, steps = contraction(dims), made.of("out")
    local = {d: np.einsum(equation, held[0][d], held[1][d]) for d in mesh.devices}
    check_steps(steps, dims.out_shape, made.partial, made.out, mesh.sizes, ITEMSIZES[2])
    got = mesh.carry_out(local, steps)
    if made.unreduced:  # the caller's sum
        whole = Step("psum", made.unreduced, made.out, made.out)
        got = mesh.carry_out(got, [whole])
    want = mesh.place(np.einsum(equation, *arrays), made.out)
    for device in mesh.devices:
        np.testing.assert_array_equal(got[device], want[device])


def _check_form(mesh: Mesh, dims: GemmDims, made: Plan, wanted) -> None:
    for spec in (made.lhs, made.rhs, made.partial, made.finished, made.out):
        assert uses_axes_once(spec)
    for spec, shape in ((made.lhs, dims.lhs_shape), (made.rhs, dims.rhs_shape)):
        assert len(spec) == len(shape)
    assert len(made.partial) == len(made.out) == len(dims.out_shape)
    # The axes of contracting dims are those that are summed, now or by the caller.
    summed = {a for i in dims.lhs_k for a in made.lhs[i]}
    assert {*made.reduce, *made.batch_reduce} == summed
    assert {a for j in dims.rhs_k for a in made.rhs[j]} == summed
    assert not {*made.reduce} & {*made.batch_reduce}
    kinds = ("psum", "psum_scatter")
    over = [a for s in made.steps if s.kind in kinds for a in s.axes]
    big = {a for a in made.unreduced if mesh.sizes[a] > 1}
    assert sorted(over) == sorted(summed - big)
    assert big <= summed
    assert all(s.array == "out" for s in made.steps if s.kind in kinds)
    assert made.steps == made.of("lhs") + made.of("rhs") + made.of("out")
    assert made.before_finish + made.after_finish == made.of("out")
    if not isinstance(wanted, str | None):
        asked = divisible(dims.out_shape, wanted, mesh.sizes.items())
        assert divisible(dims.out_shape, made.out, mesh.sizes.items()) == asked
    assert made.bytes == pytest.approx(sum(s.bytes for s in made.steps))
    local = operations(dims) / shards((*axes_in(made.partial), *summed), mesh.sizes)
    assert made.flops == pytest.approx(local)


def contraction(dims: GemmDims) -> str:
    """The product for einsum."""
    lhs = [chr(ord("a") + i) for i in range(len(dims.lhs_shape))]
    rhs = [chr(ord("n") + j) for j in range(len(dims.rhs_shape))]
    for i, j in zip(dims.lhs_k + dims.lhs_batch, dims.rhs_k + dims.rhs_batch, strict=True):
        rhs[j] = lhs[i]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(dims.to_out(lhs, rhs))}"


def random_product(
    rng: random.Random, sizes: Sequence[int] = (1, 2, 3, 4, 6, 12), most: int = 5
) -> GemmDims:
    """Several contracting, free and true batch dims in any place, some of them batch-like."""
    kinds = [rng.choice("kblr") for _ in range(rng.randint(1, most))]
    lengths = [rng.choice(sizes) for _ in kinds]
    lhs_dims = [n for n, kind in enumerate(kinds) if kind in "kbl"]
    rhs_dims = [n for n, kind in enumerate(kinds) if kind in "kbr"]
    rng.shuffle(lhs_dims)
    rng.shuffle(rhs_dims)
    places = {kind: [n for n, given in enumerate(kinds) if given == kind] for kind in "kb"}
    like = [tuple(rng.sample(range(len(d)), rng.randint(0, len(d)))) for d in (lhs_dims, rhs_dims)]
    return GemmDims(
        tuple(lengths[n] for n in lhs_dims),
        tuple(lengths[n] for n in rhs_dims),
        *(
            tuple(side.index(n) for n in places[kind])
            for kind in "kb"
            for side in (lhs_dims, rhs_dims)
        ),
        *like,
    )
