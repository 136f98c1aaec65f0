"""Plans of products move the fewest bytes that there are: against the brute-force bound.

SHARDOPS_EXHAUSTIVE=1 tries every case of the larger meshes and of 3-dim operands as well.
"""

import itertools
import os
import random
from dataclasses import replace

import pytest

from shardops.rules import gemm_search, plan_gemm
from shardops.rules.gemm import plan as gemm_plan
from tests.rules.brute_force import (
    Array,
    Product,
    State,
    bound,
    in_parts,
    layouts,
    moves,
    parted,
    products,
)

EXHAUSTIVE = os.environ.get("SHARDOPS_EXHAUSTIVE") == "1"
TWO = (("dp", 2), ("tp", 4))
THREE = (("a", 2), ("b", 2), ("c", 2))
ANY = "cheapest"


def of_matrices(m, n, k, mesh):
    return Product(Array((m, k)), Array((k, n)), ((1,), (0,)), mesh)


PRODUCTS = {  # name: product, how many cases, None: all
    "long K": (of_matrices(16, 32, 64, TWO), None),
    "many rows": (of_matrices(64, 16, 16, TWO), None),
    "few rows": (of_matrices(8, 128, 16, TWO), None),
    "uneven": (of_matrices(6, 32, 12, TWO), None),
    "halves summed in float32": (
        Product(Array((16, 64), 2), Array((64, 32), 2), ((1,), (0,)), TWO, out_itemsize=4),
        600,
    ),
    "3-dim lhs": (Product(Array((8, 16, 32)), Array((32, 16)), ((2,), (0,)), TWO), 600),
    "3-dim weight gradient": (
        Product(Array((8, 16, 32)), Array((8, 16, 64)), ((0, 1), (0, 1)), TWO),
        600,
    ),
    "3-dim rhs": (Product(Array((64, 16)), Array((16, 8, 4)), ((1,), (0,)), TWO), 600),
    "three axes": (of_matrices(16, 32, 64, THREE), 600),
    "three axes, uneven": (of_matrices(12, 16, 24, THREE), 300),
    "three axes, 3-dim lhs": (
        Product(Array((8, 16, 32)), Array((32, 16)), ((2,), (0,)), THREE),
        100,
    ),
}
each = pytest.mark.parametrize("name", PRODUCTS)


def cases(name):
    """(lhs, rhs, wanted) of a product: every one, or always the same sample."""
    product, count = PRODUCTS[name]
    wanted = (*layouts(product.out.shape, product.mesh), ANY, None)
    every = list(
        itertools.product(
            layouts(product.lhs.shape, product.mesh),
            layouts(product.rhs.shape, product.mesh),
            wanted,
        )
    )
    if EXHAUSTIVE:
        count = 150_000  # all but those of 3-dim operands over three axes
    if count is None or len(every) <= count:
        return every
    return random.Random(name).sample(every, 20_000 if EXHAUSTIVE else count)


def planned(product, lhs, rhs, wanted):
    return plan_gemm(
        product.lhs.shape,
        product.rhs.shape,
        lhs,
        rhs,
        dict(product.mesh),
        contracting_dims=product.contracting,
        out_spec=wanted,
        itemsizes=(product.lhs.itemsize, product.rhs.itemsize, product.out.itemsize),
    )


@pytest.fixture(params=[0.0, gemm_search.SLACK], ids=["least", "fewer-collectives"])
def slack(request, monkeypatch):
    """What a plan may cost beyond the least, where that saves collectives."""
    monkeypatch.setattr(gemm_search, "SLACK", request.param)
    gemm_plan.cache_clear()
    yield request.param
    gemm_plan.cache_clear()


@each
def test_no_way_to_the_same_flops_moves_fewer_bytes(name, slack):
    """Where copies of the work would save bytes, the plan may still share it: at its FLOPs."""
    product, _ = PRODUCTS[name]
    wrong = []
    for lhs, rhs, wanted in cases(name):
        made = planned(product, lhs, rhs, wanted)
        least = bound(product, lhs, rhs, None if wanted == ANY else made.out, made.flops)
        if not least * (1 - 1e-6) <= made.bytes <= least * (1 + slack + 1e-6):
            wrong.append((made.bytes, least, lhs, rhs, wanted))
    wrong.sort(key=lambda case: case[0] / max(case[1], 1), reverse=True)
    assert not wrong, (len(wrong), *wrong[:3])


@each
def test_a_result_that_is_not_asked_for_keeps_the_axes_of_free_dims(name):
    product, _ = PRODUCTS[name]
    pairs = itertools.product(
        layouts(product.lhs.shape, product.mesh), layouts(product.rhs.shape, product.mesh)
    )
    for lhs, rhs in itertools.islice(pairs, 0, None, 3):
        kept = product.to_out(lhs, rhs)
        axes = [axis for dim in kept for axis in dim]
        if len(axes) == len(set(axes)):
            assert planned(product, lhs, rhs, None).out == kept


@each
def test_steps_of_a_plan_are_moves_that_join_and_cost_what_they_say(name):
    product, _ = PRODUCTS[name]
    flops = {(local.lhs, local.rhs): local.flops for local in products(product)}
    for lhs, rhs, wanted in itertools.islice(cases(name), 0, None, 7):
        plan = planned(product, lhs, rhs, wanted)
        mesh = product.mesh
        at = {"lhs": parted(State(lhs), mesh), "rhs": parted(State(rhs), mesh)}
        ready = (parted(State(plan.lhs), mesh), parted(State(plan.rhs), mesh))
        arrays = {"lhs": product.lhs, "rhs": product.rhs, "out": product.out}
        for step in plan.steps:
            if step.array == "out" and "out" not in at:
                assert (at["lhs"], at["rhs"]) == ready
                at["out"] = _multiplied(product, plan)
            state, fine = at[step.array], in_parts(mesh)
            at[step.array] = _stepped(arrays[step.array], fine, state, _fine(step, mesh))
        assert (at["lhs"], at["rhs"]) == ready
        assert at.get("out", _multiplied(product, plan)) == parted(State(plan.out), mesh)
        assert wanted in (ANY, None, plan.out)
        assert plan.bytes == pytest.approx(sum(step.bytes for step in plan.steps))
        assert plan.flops == flops[plan.lhs, plan.rhs]


def _multiplied(product, plan):
    """The result of the local products; products() knows that there is one."""
    [out] = [p.out for p in products(product) if (p.lhs, p.rhs) == (plan.lhs, plan.rhs)]
    return parted(out, product.mesh)


def _fine(step, mesh):
    """The step in parts of axes, whichever it names."""
    axes = {a for spec in (step.before, step.after, (step.axes,)) for d in spec for a in d}
    whole = {a for a, _ in mesh}
    assert {a for a in axes if a not in whole} <= {a for a, _ in in_parts(mesh)}

    def fine(spec):
        known = tuple(tuple(a for a in d if a in whole) for d in spec)
        parts = {a: parted(State(((a,),)), mesh).spec[0] for d in known for a in d}
        return tuple(tuple(p for a in d for p in parts.get(a, (a,))) for d in spec)

    (moved,) = fine((step.axes,))
    return replace(step, axes=moved, before=fine(step.before), after=fine(step.after))


def _stepped(array, mesh, state, step):
    """The state after a step, which has to be a move of the model. A step may slice by several
    axes."""
    assert step.before == state.spec
    if step.kind == "slice":
        for axis in step.axes:
            [state] = {
                m.after
                for m in moves(array, mesh, state)
                if m.kind == "slice" and m.axes == (axis,) and _along(m.after.spec, step.after)
            }
        assert (state.spec, step.bytes) == (step.after, 0)
        return state
    [move] = [
        m
        for m in moves(array, mesh, state)
        if (m.kind, m.after.spec) == (step.kind, step.after)
        and (m.kind != "psum" or m.axes == step.axes)
    ]
    assert step.bytes == pytest.approx(move.received)
    return move.after


def _along(spec, end):
    return all(e[: len(s)] == s for s, e in zip(spec, end, strict=True))
