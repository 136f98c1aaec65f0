"""The layouts that have names: what plan_gemm makes of each, in the proportions of models."""

import pytest
from jax.sharding import PartitionSpec as P

from shardops.rules import plan_gemm
from shardops.rules.gemm import plan
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.spec import to_partition_spec

SIZES = {"dp": 2, "tp": 4, "one": 1}
B, S, K, N = 8, 64, 384, 320  # neither the tokens of a group nor the weight are cheap to move
HALF = 2  # bytes of an element


def steps(made):
    """What devices send each other: (array, kind, axes)."""
    return [(s.array, s.kind, s.axes) for s in made.steps if s.collective]


def forward(lhs, rhs, out=None, s=S, k=K):
    """[B, s, k] times [k, N]."""
    return plan_gemm(
        (B, s, k),
        (k, N),
        lhs,
        rhs,
        SIZES,
        contracting_dims=((-1,), (0,)),
        batch_dims=((0,), ()),
        out_spec=out,
    )


def weight_gradient(lhs, rhs, out=None, like=((0,), (0,)), s=S, sizes=SIZES):
    """[B, s, K] and [B, s, N], summed over both first dims."""
    return plan_gemm(
        (B, s, K),
        (B, s, N),
        lhs,
        rhs,
        sizes,
        contracting_dims=((0, 1), (0, 1)),
        batch_dims=like,
        out_spec=out,
    )


def matrices(m, k, n, lhs, rhs, **options):
    return plan_gemm((m, k), (k, n), lhs, rhs, SIZES, contracting_dims=((1,), (0,)), **options)


def test_plan_column_parallel_is_local():
    p = forward(P("dp"), P(None, "tp"))
    assert to_partition_spec(p.out) == P("dp", None, "tp")
    assert p.steps == ()
    assert p.bias == (("tp",),)
    assert p.flops == 2 * B * S * K * N / 8


def test_plan_row_parallel_all_reduces():
    p = forward(P("dp", None, "tp"), P("tp"))
    assert steps(p) == [("out", "psum", ("tp",))]
    assert p.bytes == 2 * HALF * (B // 2) * S * N * 3 / 4
    assert p.reduce == ("tp",)
    assert p.batch_reduce == ()
    assert to_partition_spec(p.out) == P("dp", None, None)
    assert p.before_finish == p.of("out")


def test_plan_row_parallel_scatters_where_wanted():
    p = forward(P("dp", None, "tp"), P("tp"), out=P("dp", "tp"))
    [step] = p.steps
    assert (step.kind, step.axes, step.dim) == ("psum_scatter", ("tp",), 1)
    assert p.bytes == HALF * (B // 2) * S * N * 3 / 4
    assert to_partition_spec(p.out) == P("dp", "tp", None)
    assert p.finished == p.out


def test_plan_cheapest_scatters_a_sum_and_none_does_not():
    p = forward(P("dp", None, "tp"), P("tp"), out="cheapest")
    assert steps(p) == [("out", "psum_scatter", ("tp",))]
    assert "tp" in {a for d in p.out for a in d}
    p = forward(P("dp", None, "tp"), P("tp"), out=None)
    assert steps(p) == [("out", "psum", ("tp",))]


def test_plan_short_contracting_dim_is_gathered():
    """Both operands together are smaller than the result."""
    p = forward(P("dp", None, "tp"), P("tp"), k=32)
    assert steps(p) == [("lhs", "all_gather", ("tp",)), ("rhs", "all_gather", ("tp",))]


def test_plan_sequence_parallel_input_gathers_lhs():
    p = forward(P("dp", "tp"), P(None, "tp"), out=P("dp", None, "tp"))
    assert steps(p) == [("lhs", "all_gather", ("tp",))]
    assert to_partition_spec(p.lhs) == P("dp", None, None)
    assert to_partition_spec(p.rhs) == P(None, "tp")


@pytest.mark.parametrize("weight", [P("dp"), P(None, "dp")])
def test_plan_fsdp_gathers_the_weight(weight):
    p = forward(P("dp"), weight, s=4 * S)
    assert steps(p) == [("rhs", "all_gather", ("dp",))]
    assert p.bytes == HALF * K * N / 2
    assert to_partition_spec(p.out) == P("dp", None, None)


def test_plan_fsdp_over_both_axes_is_one_gather():
    p = forward(P(("dp", "tp")), P(("dp", "tp")), s=4 * S)
    assert steps(p) == [("rhs", "all_gather", ("dp", "tp"))]


def test_plan_batch_like_dim_keeps_a_contested_axis():
    """Without the mark the larger operand keeps it: here the weight."""
    p = matrices(8, 256, 4096, P("dp"), P(None, "dp"), batch_dims=((0,), ()))
    assert to_partition_spec(p.out) == P("dp", None)
    p = matrices(8, 256, 4096, P("dp"), P(None, "dp"))
    assert to_partition_spec(p.out) == P(None, "dp")


def test_plan_weight_gradient_reduces_over_data():
    p = weight_gradient(P("dp"), P("dp", None, "tp"))
    assert steps(p) == [("out", "psum", ("dp",))]
    assert to_partition_spec(p.out) == P(None, "tp")
    assert p.batch_reduce == ("dp",)
    assert p.reduce == ()
    p = weight_gradient(P("dp"), P("dp", None, "tp"), out=P("dp", "tp"))
    [step] = p.steps
    assert (step.kind, step.axes, step.dim) == ("psum_scatter", ("dp",), 0)


def test_plan_weight_gradient_over_batch_and_sequence_is_one_all_reduce():
    many = {"s": 16 * S}
    p = weight_gradient(P("dp", "tp"), P("dp", "tp"), like=((0, 1), (0, 1)), **many)
    assert steps(p) == [("out", "psum", ("dp", "tp"))]
    assert p.batch_reduce == ("dp", "tp")
    p = weight_gradient(P("dp", "tp"), P("dp", "tp"), like=((0,), (0,)), **many)
    assert steps(p) == [("out", "psum", ("dp", "tp"))]
    assert p.batch_reduce == ("dp",)
    assert p.reduce == ("tp",)


def test_plan_two_axes_on_one_contracting_dim_are_one_sum():
    p = forward(P(None, None, ("dp", "tp")), P(("dp", "tp")), k=16 * K)
    assert steps(p) == [("out", "psum", ("dp", "tp"))]


def test_plan_axis_on_different_contracting_dims_moves_first():
    p = weight_gradient(P("dp"), P(None, "dp"), sizes={"dp": 2})
    assert steps(p) == [("rhs", "all_to_all", ("dp",)), ("out", "psum", ("dp",))]
    [step] = p.of("rhs")
    assert (step.dim, step.to_dim) == (1, 0)


def test_plan_uneven_dims_are_gathered_by_the_caller():
    """302 over 4 does not divide: the operands are taken as if they were whole."""
    p = matrices(60, 302, 50, P("one", "tp"), P("tp", "dp"))
    assert steps(p) == []
    assert p.lhs == ((), ())
    assert p.rhs == ((), ("dp",))
    assert to_partition_spec(p.out) == P("one", "dp")


def test_plan_blocks_stay_whole():
    blocks = {"lhs_block": (1, 32), "rhs_block": (32, 1)}
    p = matrices(8, 64, 8, P(None, "dp"), P("dp"), **blocks)
    assert steps(p) == [("out", "psum", ("dp",))]
    assert p.lhs_scale == ((), ("dp",))
    p = matrices(8, 64, 8, P(None, "tp"), P("tp"), **blocks)
    assert p.reduce == ()
    assert p.lhs_scale[1] == p.rhs_scale[0] == ()  # two blocks over four devices are gathered
    assert matrices(8, 64, 8, P(), P()).lhs_scale is None


def test_plan_idle_axes_of_the_wanted_result_slice_an_operand():
    p = forward(P(), P(), out=P("dp", None, "tp"))
    assert [(s.array, s.kind, s.axes) for s in p.steps] == [
        ("lhs", "slice", ("dp",)),
        ("rhs", "slice", ("tp",)),
    ]
    assert p.bytes == 0


def test_plan_few_rows_move_the_rows_not_the_weight():
    """Decoding: a sum over few rows costs less than the weight; with many rows the weight moves."""
    for rows, gathers in ((1, False), (8, False), (4096, True)):
        p = matrices(rows, 1024, 1024, P(), P("tp"))
        assert (p.rhs == ((), ())) == gathers
        assert (p.reduce == ("tp",)) != gathers
        assert bool(p.of("rhs")) == gathers


def test_plan_of_a_weight_over_two_axes_sums_few_rows_over_one():
    p = forward(P(None, None, "dp"), P("dp", "tp"), s=1)
    assert p.reduce == ("dp",)
    assert p.of("rhs") == ()
    assert to_partition_spec(p.out) == P(None, None, "tp")


def test_plan_gathers_the_smaller_of_operand_and_result():
    wide = matrices(64, 256, 512, P("dp"), P(), out_spec=P())
    assert steps(wide) == [("lhs", "all_gather", ("dp",))]
    narrow = matrices(64, 512, 64, P("dp"), P(), out_spec=P())
    assert steps(narrow) == [("out", "all_gather", ("dp",))]


def test_plan_true_batch_dims_slice_the_unsharded_side():
    dims = GemmDims((8, 64, 128), (8, 128, 64), (2,), (1,), (0,), (0,))
    p = plan(dims, (("dp",), (), ()), ((), (), ("tp",)), tuple(SIZES.items()))
    assert p.rhs == (("dp",), (), ("tp",))
    assert steps(p) == []


def test_plan_tokens_go_to_their_expert():
    dims = GemmDims((8, 64, 128), (8, 128, 256), (2,), (1,), (0,), (0,))
    p = plan(dims, ((), ("tp",), ()), (("tp",), (), ()), tuple(SIZES.items()))
    assert steps(p) == [("lhs", "all_to_all", ("tp",))]
    assert p.out == (("tp",), (), ())


def test_plan_leaves_the_sum_that_was_asked_for_open():
    dims, sizes = GemmDims((64, 512), (512, 64), (1,), (0,)), tuple(SIZES.items())
    shardings = ((), ("tp",)), (("tp",), ())
    p = plan(dims, *shardings, sizes, ((), ()), unreduced=("tp",))
    assert p.steps == ()
    assert p.unreduced == p.reduce == ("tp",)


def test_plan_takes_an_operand_from_where_it_is_to_be_had():
    dims, sizes = GemmDims((512, 512), (512, 512), (1,), (0,)), tuple(SIZES.items())
    shardings = (("tp",), ()), ((), ("tp",))
    assert plan(dims, *shardings, sizes, ((), ("tp",))).bytes > 0
    p = plan(dims, *shardings, sizes, ((), ("tp",)), lhs_also=(((), ()),))
    assert p.steps == ()
