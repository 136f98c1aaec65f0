"""The row-wise plan: exhaustively on two axes, at random on more, and the layouts with names."""

import itertools
import random
from math import prod

import numpy as np
import pytest

from shardops.rules.moves import move
from shardops.rules.rowwise import RowwiseCall, plan_row_sum, plan_rowwise
from shardops.rules.spec import axes_in, divisible, local_shape
from tests.rules.simulator import Mesh, all_specs, check_steps, random_spec, uses_axes_once

SIZES = (("dp", 2), ("tp", 4))
DP, TP, NONE = ("dp",), ("tp",), ()
TWO = Mesh({"a": 2, "b": 2})
THREE = Mesh({"a": 2, "b": 3, "c": 2})
FIVE = Mesh({"a": 2, "b": 3, "one": 1, "c": 2, "d": 2, "e": 2})
STATS = ("auto", "gather", "distributed")


def check_rowwise(mesh, call, offered, stats="auto", wanted=(None,), parameter=None):
    """Operands arrive, row sums are combined, results leave, sums over rows are complete."""
    axis_sizes = tuple(mesh.sizes.items())
    plan = plan_rowwise(call, offered, axis_sizes, stats, wanted, parameter)
    case = str((call, offered, stats, wanted, parameter, plan))
    array = np.random.default_rng(0).integers(-9, 9, call.shape)
    taken = [divisible(call.shape, s, axis_sizes) for s in offered]
    assert uses_axes_once(plan.x), case
    assert plan.gamma == (plan.hidden,), case
    _check_layout(call, taken, stats, plan, mesh)

    local = mesh.place(array, plan.x)
    for spec in taken:
        steps = move(call.shape, spec, plan.x, axis_sizes, 1)
        check_steps(steps, call.shape, spec, plan.x, mesh.sizes, 1)
        for device, got in mesh.carry_out(mesh.place(array, spec), steps).items():
            np.testing.assert_array_equal(got, local[device], case)

    assert len(plan.statistics) == (len(call.sums) if plan.hidden else 0), case
    sums = {d: x.sum(-1) for d, x in local.items()}
    for device, got in mesh.carry_out(sums, plan.statistics[:1]).items():
        np.testing.assert_array_equal(got, mesh.slice(array.sum(-1), plan.rows, device), case)
    for step, numbers in zip(plan.statistics, call.sums, strict=False):
        check_steps([step], call.shape[:-1], plan.rows, plan.rows, mesh.sizes, 4 * numbers)

    assert len(plan.results) == len(plan.departures) == len(call.results), case
    asked = (*wanted, *[None] * (len(call.results) - len(wanted)))
    for want, end, steps, size in zip(
        asked, plan.results, plan.departures, call.results, strict=True
    ):
        if want is not None:
            ended = divisible(call.shape, end, axis_sizes)
            assert ended == divisible(call.shape, want, axis_sizes), case
        check_steps(steps, call.shape, plan.x, end, mesh.sizes, size)
        for device, got in mesh.carry_out(local, steps).items():
            np.testing.assert_array_equal(got, mesh.slice(array, end, device), case)

    check_parameter(mesh, call, plan, array, case)
    return plan


def _check_layout(call, taken, stats, plan, mesh):
    """The last dim is whole with `gather`, as the main operand has it with `distributed`."""
    main = taken[call.main]
    if stats == "gather":
        assert plan.hidden == ()
    if stats == "distributed":
        assert plan.hidden == main[-1]


def check_parameter(mesh, call, plan, array, case):
    rows = tuple(range(len(call.shape) - 1))
    assert uses_axes_once(plan.parameter_out), case
    if not call.parameters:
        assert plan.parameter_steps == (), case
        return
    summed = [a for s in plan.parameter_steps for a in s.axes if s.kind in ("psum", "psum_scatter")]
    assert sorted(summed) == sorted(axes_in(plan.rows)), case
    check_steps(
        plan.parameter_steps,
        call.shape[-1:],
        plan.gamma,
        plan.parameter_out,
        mesh.sizes,
        4 * call.parameters,
    )
    sums = {d: mesh.slice(array, plan.x, d).sum(rows) for d in mesh.devices}
    for device, got in mesh.carry_out(sums, plan.parameter_steps).items():
        want = mesh.slice(array.sum(rows), plan.parameter_out, device)
        np.testing.assert_array_equal(got, want, case)


@pytest.mark.parametrize("shape", [(4,), (4, 8), (2, 4, 4), (3, 4), (0, 4), (6, 6)])
@pytest.mark.parametrize("stats", STATS)
def test_rowwise_every_sharding(shape, stats):
    specs = all_specs(len(shape), "ab")
    calls = [
        RowwiseCall(shape, (2,), (2,), parameters=1),
        RowwiseCall(shape, (4,), (2,), sums=(1, 1)),
    ]
    wanted, parameters = [None, *specs[::3]], [None, *all_specs(1, "ab")]
    for n, (spec, want) in enumerate(itertools.product(specs, wanted)):
        parameter = parameters[n % len(parameters)]
        check_rowwise(TWO, calls[n % 2], (spec,), stats, (want,), parameter)


@pytest.mark.parametrize("mesh", [THREE, FIVE], ids=["three", "five"])
@pytest.mark.parametrize("stats", STATS)
def test_rowwise_random_operands_and_results(mesh, stats):
    """Several row-shaped operands, each its own sharding; results wanted anywhere."""
    rng = random.Random(stats)
    for _ in range(60):
        shape = tuple(rng.choice((1, 2, 3, 4, 6, 12)) for _ in range(rng.randint(1, 4)))
        operands, results = rng.randint(1, 3), rng.randint(1, 2)

        def spec(shape=shape):
            return random_spec(rng, len(shape), mesh.names)

        call = RowwiseCall(
            shape,
            tuple(rng.choice((2, 4)) for _ in range(operands)),
            tuple(rng.choice((2, 4)) for _ in range(results)),
            sums=rng.choice(((1,), (1, 1), (2,))),
            parameters=rng.randint(0, 2),
            main=rng.randrange(operands),
        )
        wanted = tuple(rng.choice((None, spec())) for _ in range(rng.randint(1, results)))
        parameter = rng.choice((None, random_spec(rng, 1, mesh.names)))
        offered = tuple(spec() for _ in range(operands))
        check_rowwise(mesh, call, offered, stats, wanted, parameter)


@pytest.mark.parametrize("shape", [(4, 2, 4), (3, 4, 2)])
def test_row_sum_every_sharding(shape):
    mesh = TWO
    axis_sizes = tuple(mesh.sizes.items())
    x = np.random.default_rng(0).integers(-9, 9, shape)
    for kept, rows in ((0, 1), (0, 2), (1, 1), (1, 2), (0, 3), (0, 0)):
        summed = tuple(range(kept, kept + rows))
        total = x.sum(summed)
        for spec, want in itertools.product(
            all_specs(3, "ab"), [None, *all_specs(total.ndim, "ab")]
        ):
            plan = plan_row_sum(shape, spec, kept, rows, axis_sizes, want)
            assert plan.operand == divisible(shape, spec, axis_sizes)
            partial = plan.operand[:kept] + plan.operand[kept + rows :]
            check_steps(plan.steps, total.shape, partial, plan.out, mesh.sizes, 4)
            local = {d: mesh.slice(x, plan.operand, d).sum(summed) for d in mesh.devices}
            for device, got in mesh.carry_out(local, plan.steps).items():
                np.testing.assert_array_equal(got, mesh.slice(total, plan.out, device), str(plan))


def rowwise(shape, spec, *options, itemsize=2, parameters=0, **more):
    call = RowwiseCall(shape, (itemsize,), (itemsize,), parameters=parameters)
    return plan_rowwise(call, (spec,), SIZES, *options, **more)


def moved(shape, spec, plan, itemsize=2):
    """Bytes of operand, statistics and results together."""
    arrivals = move(shape, spec, plan.x, SIZES, itemsize)
    return sum(s.bytes for s in (*arrivals, *plan.steps))


def test_rowwise_rows_keep_their_axes_and_parameters_sum_over_them():
    plan = rowwise((8, 16, 4096), (DP, TP, NONE), parameters=1)
    assert plan.x == plan.results[0] == (DP, TP, NONE)
    assert plan.statistics == plan.departures[0] == ()
    [step] = plan.parameter_steps
    assert (step.kind, step.axes) == ("psum", ("dp", "tp"))
    assert step.bytes == 2 * 4 * 4096 * 7 / 8


def test_rowwise_parameter_scatters_where_wanted():
    plan = rowwise((8, 4096), (DP, NONE), parameters=1, parameter_wanted=(DP,))
    [step] = plan.parameter_steps
    assert (step.kind, step.axes, step.dim) == ("psum_scatter", DP, 0)
    assert plan.parameter_out == (DP,)


def test_rowwise_two_parameters_are_one_sum_of_twice_the_bytes():
    [one], [two] = (rowwise((8, 4096), (DP, NONE), parameters=n).parameter_steps for n in (1, 2))
    assert two.bytes == 2 * one.bytes


def test_rowwise_wide_rows_are_distributed():
    """A few statistics a row instead of a row, forth and back."""
    shape, spec = (64, 8192), (DP, TP)
    plan = rowwise(shape, spec)
    assert plan.hidden == TP
    assert plan.results == (spec,)
    [step] = plan.steps
    assert (step.kind, step.axes) == ("psum", TP)
    assert step.bytes == 2 * 4 * prod(local_shape(shape[:1], (DP,), dict(SIZES))) * 3 / 4
    assert moved(shape, spec, plan) < moved(shape, spec, rowwise(shape, spec, "gather"))


def test_rowwise_gathers_where_the_result_is_wanted_whole():
    """The result's gather would move as much, and the statistics come on top."""
    shape, spec, whole = (64, 8192), (DP, TP), ((DP, NONE),)
    plan = rowwise(shape, spec, "auto", whole)
    assert plan.hidden == ()
    assert plan.steps == ()
    apart = rowwise(shape, spec, "distributed", whole)
    assert apart.hidden == TP
    assert moved(shape, spec, plan) < moved(shape, spec, apart)


def test_rowwise_few_elements_a_row_go_to_their_rows():
    """Narrow rows: moving them between dims is less than their statistics."""
    shape, spec = (64, 4), (DP, TP)
    plan = rowwise(shape, spec)
    assert plan.hidden == ()
    assert moved(shape, spec, plan) < moved(shape, spec, rowwise(shape, spec, "distributed"))


def test_rowwise_of_a_smaller_result_gathers_that():
    """float32 in, bfloat16 out: wide rows are normalized where they are, then gathered."""
    call = RowwiseCall((64, 8192), (4,), (2,))
    plan = plan_rowwise(call, ((DP, TP),), SIZES, "auto", ((DP, NONE),))
    assert plan.hidden == TP
    assert [s.kind for s in plan.departures[0]] == ["all_gather"]


def test_rowwise_gather_and_dims_that_do_not_divide():
    assert rowwise((64, 8192), (DP, TP), "gather").hidden == ()
    plan = rowwise((64, 8190), (DP, TP))  # 8190 over 4 does not divide
    assert plan.x == plan.results[0] == (DP, NONE)


def test_rowwise_results_have_the_layout_of_the_main_operand():
    call = RowwiseCall((64, 8192), (2, 2), (2,), main=1)
    assert plan_rowwise(call, ((TP, NONE), (DP, NONE)), SIZES).results == ((DP, NONE),)
    assert plan_rowwise(call, ((DP, NONE), (DP, TP)), SIZES, "gather").results == ((DP, NONE),)


def test_rowwise_idle_axes_of_the_wanted_result_slice_rows():
    plan = rowwise((8, 16, 4096), (DP, NONE, NONE), wanted=((DP, TP, NONE),))
    assert plan.rows == (DP, TP)
    assert plan.steps == ()
