"""The softmax plan: exhaustively on two axes, and the layouts that have names."""

import itertools

import numpy as np
import pytest

from shardops.rules.softmax import plan_softmax
from tests.rules.simulator import Mesh, all_specs, uses_axes_once

SIZES = (("dp", 2), ("tp", 4))


def _row_sums(x, hidden):
    """What softmax is for a plan: each row's result takes all of the row that it sees."""
    seen = np.where(hidden, 0, x)
    return seen - seen.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [(4,), (4, 4), (2, 4, 4), (3, 4), (0, 4), (6, 6)])
def test_softmax_plan_every_sharding(shape):
    """On every device the local result is its part of the whole one, masks and queries included."""
    mesh, rng = Mesh({"a": 2, "b": 2}), np.random.default_rng(0)
    x = rng.integers(-9, 9, shape)
    masks = [tuple(d) for d in itertools.product(*((1, n) for n in shape))]
    wanted = [None, *all_specs(len(shape), "ab")[::3]]
    for n, (spec, want) in enumerate(itertools.product(all_specs(len(shape), "ab"), wanted)):
        mask_shape = masks[n % len(masks)]
        mask = rng.random(mask_shape) < 0.3
        plan = plan_softmax(shape, spec, tuple(mesh.sizes.items()), mask_shape, want)
        context = str((shape, spec, want, plan))
        assert uses_axes_once(plan.x), context
        assert plan.x[-1] == (), context
        assert plan.mask is not None, context
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


def test_softmax_plan_keeps_the_axes_of_rows():
    spec = (("dp",), (), ("tp",), ())
    plan = plan_softmax((8, 3, 16, 32), spec, SIZES)
    assert plan.x == spec
    assert plan.queries == ("tp",)


def test_softmax_plan_gathers_keys_and_axes_that_do_not_divide():
    assert plan_softmax((8, 32), (("dp",), ("tp",)), SIZES).x == (("dp",), ())
    assert plan_softmax((8, 6, 32), (("dp",), ("tp",), ()), SIZES).x == (("dp",), (), ())
    assert plan_softmax((32,), (("tp",),), SIZES).x == ((),)


def test_softmax_plan_lays_the_mask_out_as_the_logits():
    spec = (("dp",), ("tp",), (), ())
    masks = {
        (8, 4, 16, 32): spec,
        (1, 1, 16, 32): ((), (), (), ()),
        (8, 1, 1, 32): (("dp",), (), (), ()),
        (1, 4, 1, 1): ((), ("tp",), (), ()),
    }
    for mask, want in masks.items():
        assert plan_softmax((8, 4, 16, 32), spec, SIZES, mask).mask == want


def test_softmax_plan_slices_by_idle_axes_of_the_wanted_result():
    x, whole = (("dp",), (), (), ()), (8, 4, 16, 32)
    assert plan_softmax(whole, x, SIZES, wanted=(("dp",), (), ("tp",), ())).queries == ("tp",)
    # Keys wanted sharded: computed whole.
    assert plan_softmax(whole, x, SIZES, wanted=(("dp",), (), (), ("tp",))).x == x
    # An axis of the keys is idle once they are gathered.
    of_keys = (("dp",), (), (), ("tp",))
    assert plan_softmax(whole, of_keys, SIZES, wanted=(("dp",), (), ("tp",), ())).x == (
        ("dp",), (), ("tp",), (),
    )  # fmt: skip
