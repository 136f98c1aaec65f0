"""The row-wise plan: exhaustively on two axes, and the layouts that have names."""

import itertools

import numpy as np
import pytest

from shardops.rules.rowwise import plan_row_sum, plan_rowwise
from shardops.rules.spec import axes_in
from tests.rules.simulator import Mesh, all_specs, uses_axes_once

SIZES = (("dp", 2), ("tp", 4))


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 4), (3, 4), (0, 4), (6, 6)])
@pytest.mark.parametrize("stats", ["auto", "gather", "distributed"])
def test_rowwise_every_sharding(shape, stats):
    mesh, rng = Mesh({"a": 2, "b": 2}), np.random.default_rng(0)
    x = rng.integers(-9, 9, shape)
    rows = tuple(range(len(shape) - 1))
    parameter_specs = [None, *all_specs(1, "ab")]
    wanted = [None, *all_specs(len(shape), "ab")[::3]]
    for spec, want, param in itertools.product(
        all_specs(len(shape), "ab"), wanted, parameter_specs
    ):
        plan = plan_rowwise(shape, spec, tuple(mesh.sizes.items()), stats, want, param)
        context = str((shape, spec, want, param, plan))
        assert uses_axes_once(plan.x), context
        assert uses_axes_once(plan.parameter_out), context
        assert set(plan.parameter.axes) == set(axes_in(plan.rows)), context
        if stats == "gather":
            assert plan.hidden == (), context
        sums = {d: mesh.slice(x, plan.x, d).sum(rows) for d in mesh.devices}
        for device, got in mesh.reduce(sums, plan.parameter).items():
            want_shard = mesh.slice(x.sum(rows), plan.parameter_out, device)
            np.testing.assert_array_equal(got, want_shard, context)


@pytest.mark.parametrize("shape", [(4, 2, 4), (3, 4, 2)])
def test_row_sum_every_sharding(shape):
    mesh, rng = Mesh({"a": 2, "b": 2}), np.random.default_rng(0)
    x = rng.integers(-9, 9, shape)
    for kept, rows in ((0, 1), (0, 2), (1, 1), (0, 3), (0, 0)):
        summed = tuple(range(kept, kept + rows))
        total = x.sum(summed)
        for spec, want in itertools.product(
            all_specs(3, "ab"), [None, *all_specs(total.ndim, "ab")]
        ):
            plan = plan_row_sum(shape, spec, kept, rows, tuple(mesh.sizes.items()), want)
            local = {d: mesh.slice(x, plan.operand, d).sum(summed) for d in mesh.devices}
            for device, got in mesh.reduce(local, plan.reduction).items():
                np.testing.assert_array_equal(got, mesh.slice(total, plan.out, device), str(plan))


def test_rowwise_rows_keep_their_axes_and_parameters_sum_over_them():
    plan = plan_rowwise((8, 16, 32), (("dp",), ("tp",), ()), SIZES)
    assert plan.x == (("dp",), ("tp",), ())
    assert plan.parameter.all_reduce == ("dp", "tp")


def test_rowwise_parameter_scatters_where_wanted():
    plan = plan_rowwise((8, 32), (("dp",), ()), SIZES, parameter_wanted=(("dp",),))
    assert plan.parameter.scatter == ((0, ("dp",)),)
    assert plan.parameter_out == (("dp",),)


def test_rowwise_sharded_row_is_distributed_or_gathered():
    spec = (("dp",), ("tp",))
    assert plan_rowwise((8, 32), spec, SIZES).hidden == ("tp",)
    assert plan_rowwise((8, 32), spec, SIZES, "gather").hidden == ()
    assert plan_rowwise((8, 30), spec, SIZES).hidden == ()  # 30 over 4 does not divide


def test_rowwise_idle_axes_of_the_wanted_result_slice_rows():
    plan = plan_rowwise((8, 16, 32), (("dp",), (), ()), SIZES, wanted=(("dp",), ("tp",), ()))
    assert plan.rows == (("dp",), ("tp",))
