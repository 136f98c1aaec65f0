"""plan_gemm against a mesh simulated in numpy: every sharding of small products."""

import itertools
import random

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardops.rules import plan_gemm
from shardops.rules.gemm import plan
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.spec import axes_in, to_partition_spec
from tests.rules.simulator import Mesh, all_specs, uses_axes_once

SIZES = {"dp": 2, "tp": 4, "one": 1}
X, W = (8, 16, 32), (32, 64)


def run_on(mesh, dims, lhs, rhs, planned):
    """The shards of the result that `planned` leaves on the devices of `mesh`."""
    contraction = "".join(
        [
            _letters(dims, "lhs"),
            ",",
            _letters(dims, "rhs"),
            "->",
            "".join(dims.to_out(_letters(dims, "lhs"), _letters(dims, "rhs"))),
        ]
    )
    local = {
        d: np.einsum(contraction, mesh.slice(lhs, planned.lhs, d), mesh.slice(rhs, planned.rhs, d))
        for d in mesh.devices
    }
    return mesh.reduce(local, planned.reduction), np.einsum(contraction, lhs, rhs)


def _letters(dims, side):
    lhs = [chr(ord("a") + i) for i in range(len(dims.lhs_shape))]
    rhs = [chr(ord("n") + j) for j in range(len(dims.rhs_shape))]
    for i, j in zip(dims.lhs_k + dims.lhs_batch, dims.rhs_k + dims.rhs_batch, strict=True):
        rhs[j] = lhs[i]
    return "".join(lhs if side == "lhs" else rhs)


def check(mesh, dims, lhs_spec, rhs_spec, wanted, rng):
    planned = plan(dims, lhs_spec, rhs_spec, tuple(mesh.sizes.items()), wanted)
    context = (dims, lhs_spec, rhs_spec, wanted, planned)
    for spec in (planned.lhs, planned.rhs, planned.partial, planned.out):
        assert uses_axes_once(spec), context
    assert set(planned.reduce) | set(planned.batch_reduce) == set(planned.reduction.axes), context
    assert not set(planned.reduction.axes) & set(axes_in(planned.partial)), context
    lhs = rng.integers(-9, 9, dims.lhs_shape)
    rhs = rng.integers(-9, 9, dims.rhs_shape)
    got, want = run_on(mesh, dims, lhs, rhs, planned)
    for device, shard in got.items():
        np.testing.assert_array_equal(shard, mesh.slice(want, planned.out, device), str(context))
    return planned


@pytest.mark.parametrize(
    "shape", [(4, 4, 4), (4, 6, 4), (6, 2, 4), (1, 4, 3), (4, 0, 4), (0, 4, 4)]
)
def test_plan_matrices_every_sharding(shape):
    m, k, n = shape
    mesh, rng = Mesh({"a": 2, "b": 2}), np.random.default_rng(0)
    dims = GemmDims((m, k), (k, n), (1,), (0,))
    specs = all_specs(2, "ab")
    wanted = [None, "cheapest", *specs]
    for lhs, rhs, want in itertools.product(specs, specs, wanted):
        check(mesh, dims, lhs, rhs, want, rng)


@pytest.mark.parametrize("seed", range(8))
def test_plan_random_products(seed):
    """Several contracting, free and true batch dims in any place, on three axes."""
    random.seed(seed)
    mesh, rng = Mesh({"a": 2, "b": 3, "c": 2}), np.random.default_rng(seed)
    for _ in range(150):
        kinds = [random.choice(("k", "b", "l", "r")) for _ in range(random.randint(1, 5))]
        sizes = [random.choice((1, 2, 3, 4, 6, 12)) for _ in kinds]
        lhs_dims = [n for n, kind in enumerate(kinds) if kind in "kbl"]
        rhs_dims = [n for n, kind in enumerate(kinds) if kind in "kbr"]
        random.shuffle(lhs_dims)
        random.shuffle(rhs_dims)
        places = {
            kind: [n for n, given in enumerate(kinds) if given == kind] for kind in ("k", "b")
        }
        like = [
            tuple(random.sample(range(len(d)), random.randint(0, len(d))))
            for d in (lhs_dims, rhs_dims)
        ]
        dims = GemmDims(
            tuple(sizes[n] for n in lhs_dims),
            tuple(sizes[n] for n in rhs_dims),
            tuple(lhs_dims.index(n) for n in places["k"]),
            tuple(rhs_dims.index(n) for n in places["k"]),
            tuple(lhs_dims.index(n) for n in places["b"]),
            tuple(rhs_dims.index(n) for n in places["b"]),
            *like,
        )
        lhs = random.choice(all_specs(len(lhs_dims), "abc"))
        rhs = random.choice(all_specs(len(rhs_dims), "abc"))
        out = random.choice([None, "cheapest", *all_specs(len(dims.out_shape), "abc")])
        check(mesh, dims, lhs, rhs, out, rng)


def forward(lhs, rhs, out=None, **options):
    return plan_gemm(
        X,
        W,
        lhs,
        rhs,
        SIZES,
        contracting_dims=((-1,), (0,)),
        batch_dims=((0,), ()),
        out_spec=out,
        **options,
    )


def weight_gradient(lhs, rhs, out=None, like=((0,), (0,))):
    return plan_gemm(
        X,
        (8, 16, 64),
        lhs,
        rhs,
        SIZES,
        contracting_dims=((0, 1), (0, 1)),
        batch_dims=like,
        out_spec=out,
    )


def test_plan_column_parallel_is_local():
    p = forward(P("dp"), P(None, "tp"))
    assert to_partition_spec(p.out) == P("dp", None, "tp")
    assert not p.reduction
    assert p.bias == (("tp",),)


def test_plan_row_parallel_all_reduces():
    p = forward(P("dp", None, "tp"), P("tp"))
    assert p.reduction.all_reduce == ("tp",)
    assert not p.reduction.scatter
    assert p.reduce == ("tp",)
    assert p.batch_reduce == ()
    assert to_partition_spec(p.out) == P("dp", None, None)


def test_plan_row_parallel_scatters_where_wanted():
    p = forward(P("dp", None, "tp"), P("tp"), out=P("dp", "tp"))
    assert p.reduction.scatter == ((1, ("tp",)),)
    assert not p.reduction.all_reduce
    assert to_partition_spec(p.out) == P("dp", "tp", None)


def test_plan_cheapest_scatters():
    p = forward(P("dp", None, "tp"), P("tp"), out="cheapest")
    assert p.reduction.scatter == ((0, ("tp",)),)
    p = forward(P("dp", None, "tp"), P("tp"), out=None)
    assert p.reduction.all_reduce == ("tp",)


def test_plan_sequence_parallel_input_gathers_lhs():
    p = forward(P("dp", "tp"), P(None, "tp"), out=P("dp", None, "tp"))
    assert to_partition_spec(p.lhs) == P("dp", None, None)
    assert to_partition_spec(p.rhs) == P(None, "tp")


@pytest.mark.parametrize("weight", [P("dp"), P(None, "dp")])
def test_plan_fsdp_gathers_the_weight(weight):
    p = forward(P("dp"), weight)
    assert to_partition_spec(p.rhs) == P(None, None)
    assert not p.reduction
    assert to_partition_spec(p.out) == P("dp", None, None)


def test_plan_batch_like_dim_keeps_a_contested_axis():
    """Without the mark the larger operand keeps it: here the weight."""
    small, large = (8, 4), (4, 4096)
    common = {"contracting_dims": ((1,), (0,))}
    p = plan_gemm(small, large, P("dp"), P(None, "dp"), SIZES, batch_dims=((0,), ()), **common)
    assert to_partition_spec(p.out) == P("dp", None)
    p = plan_gemm(small, large, P("dp"), P(None, "dp"), SIZES, **common)
    assert to_partition_spec(p.out) == P(None, "dp")


def test_plan_weight_gradient_reduces_over_data():
    p = weight_gradient(P("dp"), P("dp", None, "tp"))
    assert p.reduction.all_reduce == ("dp",)
    assert to_partition_spec(p.out) == P(None, "tp")
    assert p.batch_reduce == ("dp",)
    assert p.reduce == ()
    p = weight_gradient(P("dp"), P("dp", None, "tp"), out=P("dp", "tp"))
    assert p.reduction.scatter == ((0, ("dp",)),)
    assert not p.reduction.all_reduce


def test_plan_weight_gradient_over_batch_and_sequence_is_one_all_reduce():
    p = weight_gradient(P("dp", "tp"), P("dp", "tp"), like=((0, 1), (0, 1)))
    assert p.reduction.all_reduce == ("dp", "tp") == p.batch_reduce
    p = weight_gradient(P("dp", "tp"), P("dp", "tp"), like=((0,), (0,)))
    assert p.batch_reduce == ("dp",)
    assert p.reduce == ("tp",)
    assert p.reduction.all_reduce == ("dp", "tp")


def test_plan_two_axes_on_one_contracting_dim_are_one_sum():
    p = forward(P(None, None, ("dp", "tp")), P(("dp", "tp")))
    assert p.reduction.all_reduce == ("dp", "tp")


def test_plan_axis_on_different_contracting_dims_is_gathered():
    p = weight_gradient(P("dp"), P(None, "dp"))
    assert not p.reduction
    assert to_partition_spec(p.lhs) == P(None, None, None)


def test_plan_uneven_dims_are_gathered():
    p = plan_gemm(
        (6, 30), (30, 5), P("one", "tp"), P("tp", "dp"), SIZES, contracting_dims=((1,), (0,))
    )
    assert not p.reduction
    assert to_partition_spec(p.lhs) == P("one", None)
    assert to_partition_spec(p.rhs) == P(None, None)


def test_plan_blocks_stay_whole():
    shapes = {"contracting_dims": ((1,), (0,)), "lhs_block": (1, 32), "rhs_block": (32, 1)}
    p = plan_gemm((8, 64), (64, 8), P(None, "dp"), P("dp"), SIZES, **shapes)
    assert p.reduction.all_reduce == ("dp",)
    assert p.lhs_scale == ((), ("dp",))
    p = plan_gemm((8, 64), (64, 8), P(None, "tp"), P("tp"), SIZES, **shapes)
    assert not p.reduction
    assert p.lhs_scale == ((), ())


def test_plan_idle_axes_of_the_wanted_result_slice_an_operand():
    p = forward(P(), P(), out=P("dp", None, "tp"))
    assert to_partition_spec(p.lhs) == P("dp", None, None)
    assert to_partition_spec(p.rhs) == P(None, "tp")


def test_plan_few_rows_move_the_rows_not_the_weight():
    """Decoding: a sum over few rows costs less than the weight; with many rows the weight moves."""
    for rows, gathers in ((1, False), (4096, True)):
        p = plan_gemm(
            (rows, 1024), (1024, 1024), P(), P("tp"), SIZES, contracting_dims=((1,), (0,))
        )
        assert (p.rhs == ((), ())) == gathers
        assert bool(p.reduction) != gathers


def test_plan_gathers_the_smaller_of_operand_and_result():
    wide = plan_gemm(
        (64, 256), (256, 512), P("dp"), P(), SIZES, contracting_dims=((1,), (0,)), out_spec=P()
    )
    assert wide.lhs == ((), ())
    narrow = plan_gemm(
        (64, 512), (512, 64), P("dp"), P(), SIZES, contracting_dims=((1,), (0,)), out_spec=P()
    )
    assert narrow.lhs == (("dp",), ())


def test_plan_true_batch_dims_slice_the_unsharded_side():
    dims = GemmDims((8, 4, 4), (8, 4, 4), (2,), (1,), (0,), (0,))
    p = plan(dims, (("dp",), (), ()), ((), (), ("tp",)), tuple(SIZES.items()))
    assert p.rhs == (("dp",), (), ("tp",))
    assert not p.reduction


def test_plan_is_remembered_and_refuses_long_specs():
    assert forward(P("dp"), P()) is forward(P("dp"), P())
    with pytest.raises(ValueError, match="3 entries; expected at most 2"):
        forward(P("dp"), P(None, None, "tp"))
