"""Names of operands, results and dims."""

from dataclasses import dataclass

import pytest

from shardops.explaining.names import names, result_shapes
from shardops.explaining.reasons import reason
from shardops.explaining.report import entries_of
from shardops.op import Placement
from shardops.placing import placed
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.norm_op import NormBackward, NormForward
from shardops.primitives.row_sum import RowSumOp
from shardops.recording import Record
from shardops.rules.hardware import DEFAULT
from shardops.rules.step import Step

SIZES = (("dp", 2), ("tp", 4))


def said(arrays):
    return [f"{a.name} {' '.join(a.dims)}".strip() for a in arrays]


def test_a_product_has_free_contracting_and_batch_dims():
    op = GemmOp("gemm", ((3,), (2,)), batch=((0,), (0,)), bias=True, add=True, save=True)
    shapes = (2, 3, 4, 5), (2, 6, 5), (6,), (2, 3, 4, 6)
    named = names(op, shapes)
    assert said(named.operands) == ["lhs B M0 M1 K", "rhs B N K", "bias N", "add B M0 M1 N"]
    assert said(named.results) == ["out B M0 M1 N", "pre-activation B M0 M1 N"]
    assert result_shapes(named, shapes) == ((2, 3, 4, 6),) * 2


def test_the_gradients_of_a_product_keep_its_names():
    shapes = (3, 6), (5, 6)
    to_lhs = names(GemmOp("gemm", ((1,), (1,))), shapes, "lhs")
    assert said((*to_lhs.operands, *to_lhs.results)) == ["dout M N", "rhs K N", "dlhs M K"]
    to_rhs = names(GemmOp("gemm", ((0,), (0,))), ((3, 5), (3, 6)), "rhs")
    assert said((*to_rhs.operands, *to_rhs.results)) == ["lhs M K", "dout M N", "drhs K N"]


def test_norms_have_rows_and_a_hidden_dim():
    forward = NormForward("layer", True, True, 1e-6, False, "auto", False)
    named = names(forward, ((2, 3, 8), (8,), (8,), (2, 3, 8)))
    assert said(named.operands) == ["x R0 R1 H", "gamma H", "beta H", "add R0 R1 H"]
    assert said(named.results) == ["y R0 R1 H", "h R0 R1 H", "mean R0 R1", "rstd R0 R1"]
    backward = NormBackward("rms", False, False, False, "auto", False)
    named = names(backward, ((6, 8), (6, 8), (8,), (6,)))
    assert said(named.operands) == ["dy R H", "h R H", "gamma H", "rstd R"]
    assert said(named.results) == ["dx R H", "dgamma H"]


def recorded(op, shapes, offered, wanted=()):
    itemsizes = (4,) * len(shapes)
    placement = placed(op, shapes, offered, SIZES, wanted, itemsizes)
    return Record(op, "auto", shapes, ("float32",) * len(shapes), offered, wanted, SIZES, placement)


@pytest.mark.parametrize(
    "wanted, says",
    [
        (None, "the summed dims are sharded over dp: partial sums, so all-reduce."),
        (
            ((("dp",),)),
            "the summed dims are sharded over dp: partial sums, so reduce-scatter to the wanted "
            "N@dp.",
        ),
    ],
)
def test_reason_of_a_bias_gradient(wanted, says):
    record = recorded(RowSumOp("gemm.grad", 1), ((16, 8),), ((("dp",), ()),), (wanted,))
    (entry,) = entries_of(record, DEFAULT)
    assert (entry.name, entry.backward) == ("gemm", True)
    assert entry.reason == says


def test_reason_of_a_norm_that_moves_nothing():
    op = NormForward("rms", False, False, 1e-6, False, "auto", False)
    record = recorded(op, ((16, 8), (8,)), ((("dp",), ()), ((),)))
    assert reason(record, names(op, record.shapes)) == (
        "x is R@dp, and each device has all that its part needs: nothing moves."
    )


@dataclass(frozen=True)
class Other:
    """An op that reports know nothing of: y[r, k] of x[r, k], for which k is gathered."""

    scope: str = "shardops.other"
    operands: tuple[str, ...] = ("x",)
    kernel: bool = False

    def place(self, call):
        spec = (*call.specs[0][:-1], ())
        step = Step("psum", ("dp",), spec, spec, 8.0, "out")
        return Placement((spec,), (spec,), None, (step,))

    def factors(self, shapes):
        return [["r", "k"]], [["r", "o"]]


def test_another_op_is_named_by_its_own_rule():
    (entry,) = entries_of(recorded(Other(), ((16, 8),), (((), ("tp",)),)), DEFAULT)
    assert entry.name == "other"
    assert said((*entry.names.operands, *entry.names.results)) == ["x r k", "out r k"]
    assert entry.results[0].shape == (16, 8)
    assert entry.reason == (
        "tp shards k of x, which the op needs whole or otherwise: gathered; "
        "partial results over dp, so all-reduce."
    )
    assert entry.bytes == 4 * 16 * 8 * 3 / 4 + 8
    assert entry.suggestion is None
