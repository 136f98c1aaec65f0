"""The softmax plan: exhaustively on two axes, and the layouts that have names."""

import itertools

import numpy as np
import pytest

from shardops.rules.softmax import plan_softmax
from shardops.rules.spec import fit
from tests.rules.simulator import Mesh, all_specs, uses_axes_once

SIZES = (("dp", 2), ("tp", 4))


def _row_sums(x, hidden):
    """What softmax is for a plan: each row's result takes all of the row that it sees."""
    seen = np.where(hidden, 0, x)
    return seen - seen.sum(-1, keepdims=True)


def _fitted(shape, spec, sizes):
    return tuple(fit(axes, n, dict(sizes)) for n, axes in zip(shape, spec, strict=True))


@pytest.mark.parametrize("shape", [(4,), (4, 4), (2, 4, 4), (3, 4), (0, 4), (6, 6)])
def test_softmax_plan_every_sharding(shape):
    """On every device the local result is its part of the whole one, masks and queries included;
    it ends where it is wanted, and is moved only where its layout on the way is another."""
    mesh, rng = Mesh({"a": 2, "b": 2}), np.random.default_rng(0)
    sizes = tuple(mesh.sizes.items())
    x = rng.integers(-9, 9, shape)
    masks = [tuple(d) for d in itertools.product(*((1, n) for n in shape))]
    wanted = [None, *all_specs(len(shape), "ab")[::3]]
    for n, (spec, want) in enumerate(itertools.product(all_specs(len(shape), "ab"), wanted)):
        mask_shape = masks[n % len(masks)]
        mask = rng.random(mask_shape) < 0.3
        plan = plan_softmax(shape, (spec,), sizes, mask_shape, want)
        context = str((shape, spec, want, plan))
        assert uses_axes_once(plan.x), context
        assert plan.x[-1] == (), context
        assert plan.mask is not None, context
        usual = (*_fitted(shape, spec, sizes)[:-1], ())
        assert plan.out == (usual if want is None else _fitted(shape, want, sizes)), context
        ends = (plan.steps[0].before, plan.steps[-1].after) if plan.steps else (plan.x, plan.x)
        assert ends == (plan.x, plan.out), context
        result, queries = _row_sums(x, mask), np.arange(shape[-2] if len(shape) > 1 else 1)
        for device in mesh.devices:
            local, hidden = mesh.slice(x, plan.x, device), mesh.slice(mask, plan.mask, device)
            np.testing.assert_array_equal(
                _row_sums(local, hidden), mesh.slice(result, plan.x, device), context
            )
            index, parts = mesh.part(device, plan.queries)
            mine = mesh.slice(queries, (plan.queries,), device)
            first = index * len(queries) // parts  # what the local share adds to its row numbers
            np.testing.assert_array_equal(mine, first + np.arange(len(mine)), context)


def _plan(shape, spec, *more, **options):
    return plan_softmax(shape, (spec,), SIZES, *more, **options)


def test_softmax_plan_keeps_the_axes_of_rows():
    spec = (("dp",), (), ("tp",), ())
    plan = _plan((8, 3, 16, 32), spec)
    assert (plan.x, plan.out, plan.steps) == (spec, spec, ())
    assert plan.queries == ("tp",)


def test_softmax_plan_gathers_keys_and_axes_that_do_not_divide():
    assert _plan((8, 32), (("dp",), ("tp",))).x == (("dp",), ())
    assert _plan((8, 6, 32), (("dp",), ("tp",), ())).out == (("dp",), (), ())
    assert _plan((32,), (("tp",),)).x == ((),)


def test_softmax_plan_lays_the_mask_out_as_the_logits():
    spec = (("dp",), ("tp",), (), ())
    masks = {
        (8, 4, 16, 32): spec,
        (1, 1, 16, 32): ((), (), (), ()),
        (8, 1, 1, 32): (("dp",), (), (), ()),
        (1, 4, 1, 1): ((), ("tp",), (), ()),
    }
    for mask, want in masks.items():
        assert _plan((8, 4, 16, 32), spec, mask).mask == want


def test_softmax_plan_slices_by_idle_axes_of_the_wanted_result():
    x, whole, end = (("dp",), (), (), ()), (8, 4, 16, 32), (("dp",), (), ("tp",), ())
    plan = _plan(whole, x, wanted=end)
    assert (plan.x, plan.out, plan.steps) == (end, end, ())


def test_softmax_plan_cuts_keys_of_the_wanted_result_where_x_is_whole():
    x, end = (("dp",), ()), (("dp",), ("tp",))
    plan = _plan((8, 32), x, wanted=end)
    assert (plan.x, plan.out) == (x, end)
    assert [(s.kind, s.bytes) for s in plan.steps] == [("slice", 0)]


def test_softmax_plan_exchanges_keys_for_rows_and_back():
    """Where both ends have them sharded: less than a gather moves."""
    keys = (("dp",), (), ("tp",))
    plan = _plan((8, 4, 32), keys, wanted=keys)
    assert plan.x[-1] == ()
    assert sorted(a for axes in plan.x for a in axes) == ["dp", "tp"]
    assert [s.kind for s in plan.steps] == ["all_to_all"]


def test_softmax_plan_of_a_gradient_weighs_both_operands():
    """dy lies where dx is wanted and y does not: y alone moves."""
    dy, y = (("dp",), ("tp",), ()), (("dp",), (), ("tp",))
    plan = plan_softmax((8, 4, 32), (dy, y), SIZES, wanted=dy)
    assert (plan.x, plan.out, plan.steps) == (dy, dy, ())
