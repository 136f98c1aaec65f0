"""What plan_gemm refuses: the error names the operand, the dim and the fix."""

import re

import pytest
from jax.sharding import PartitionSpec as P

from shardops.rules import plan_gemm

SIZES = {"dp": 2, "tp": 4}
LHS, RHS = (8, 16, 32), (32, 64)


def planned(lhs=LHS, rhs=RHS, lhs_spec=None, rhs_spec=None, contracting=((2,), (0,)), **options):
    return plan_gemm(lhs, rhs, lhs_spec, rhs_spec, SIZES, contracting_dims=contracting, **options)


@pytest.mark.parametrize(
    ("options", "argument", "says"),
    [
        pytest.param({"lhs_spec": P(None, "ep")}, "lhs_spec", "'ep' on dim 1", id="unknown axis"),
        pytest.param({"rhs_spec": P(("tp", "x"))}, "rhs_spec", "'x' on dim 0", id="unknown in two"),
        pytest.param({"out_spec": P("sp")}, "out_spec", "'sp' on dim 0", id="unknown of result"),
        pytest.param(
            {"lhs_spec": P("dp", None, "dp")},
            "lhs_spec",
            "'dp' is on dim 0 and on dim 2",
            id="axis twice",
        ),
        pytest.param(
            {"rhs_spec": P(("tp", "dp"), "tp")},
            "rhs_spec",
            "'tp' is on dim 0 and on dim 1",
            id="axis twice, once with another",
        ),
        pytest.param(
            {"rhs_spec": (("dp", "dp"),)},
            "rhs_spec",
            "'dp' is on dim 0 and on dim 0",
            id="axis twice on one dim",
        ),
        pytest.param(
            {"out_spec": P("tp", None, "tp")},
            "out_spec",
            "'tp' is on dim 0 and on dim 2",
            id="axis twice in the result",
        ),
        pytest.param(
            {"lhs_spec": P(None, None, None, "tp")},
            "lhs_spec",
            "4 entries; expected at most 3 entries, one a dim of (8, 16, 32)",
            id="too many entries",
        ),
        pytest.param(
            {"rhs_spec": P("dp", None, None)},
            "rhs_spec",
            "3 entries; expected at most 2 entries, one a dim of (32, 64)",
            id="too many entries of rhs",
        ),
        pytest.param(
            {"out_spec": P(None, None, None, None)},
            "out_spec",
            "4 entries; expected at most 3 entries, one a dim of (8, 16, 64)",
            id="too many entries of the result",
        ),
        pytest.param(
            {"rhs": (48, 64)},
            "contracting_dims",
            "Dim 2 of lhs has 32 elements and dim 0 of rhs 48",
            id="sizes differ",
        ),
        pytest.param(
            {"rhs": (16, 8, 64), "contracting": ((1, 0), (0, 2))},
            "contracting_dims",
            "Dim 0 of lhs has 8 elements and dim 2 of rhs 64",
            id="sizes of a second pair differ",
        ),
        pytest.param(
            {"contracting": ((1, 2), (0,))},
            "contracting_dims",
            "as many dims of lhs as of rhs",
            id="unpaired",
        ),
        pytest.param(
            {"contracting": ((3,), (0,))},
            "contracting_dims[0]",
            "dims of lhs of shape (8, 16, 32). Dim 3 does not exist",
            id="out of range",
        ),
        pytest.param(
            {"contracting": ((2,), (-3,))},
            "contracting_dims[1]",
            "dims of rhs of shape (32, 64). Dim -3 does not exist",
            id="out of range from the end",
        ),
        pytest.param(
            {"batch_dims": ((0, 3), ())},
            "batch_dims[0]",
            "Dim 3 does not exist",
            id="batch-like dim out of range",
        ),
        pytest.param(
            {"batch_dims": ((), (2,))},
            "batch_dims[1]",
            "dims of rhs of shape (32, 64). Dim 2 does not exist",
            id="batch-like dim of rhs out of range",
        ),
        pytest.param(
            {"rhs": (32, 32), "contracting": ((2, -1), (0, 1))},
            "contracting_dims[0]",
            "each dim once",
            id="repeated dim",
        ),
        pytest.param(
            {"lhs": (32, 32), "contracting": ((0, 1), (0, 0))},
            "contracting_dims[1]",
            "each dim once",
            id="repeated dim of rhs",
        ),
        pytest.param(
            {"batch_dims": ((0, -3), ())}, "batch_dims[0]", "each dim once", id="repeated batch"
        ),
        pytest.param(
            {"out_spec": "tp"},
            "out_spec",
            "is 'tp'; expected a spec, \"cheapest\" or None. Wrap a single axis",
            id="string",
        ),
    ],
)
def test_gemm_refuses(options, argument, says):
    with pytest.raises(ValueError, match=re.escape(f"plan_gemm: {argument} is ")) as caught:
        planned(**options)
    text = str(caught.value)
    assert says in text
    assert "; expected " in text
    assert text.endswith(".")


def test_gemm_takes_specs_as_they_are_written():
    """PartitionSpecs, tuples and None; short ones; dims from the end."""
    want = planned(lhs_spec=P("dp"), rhs_spec=P(None, "tp"))
    for lhs, rhs in (
        (P("dp", None, None), P(None, ("tp",))),
        (("dp",), (None, "tp")),
        ((("dp",),), [None, ("tp",)]),
        (["dp", None], ((), "tp")),
    ):
        assert planned(lhs_spec=lhs, rhs_spec=rhs) == want
    assert planned(lhs_spec=P("dp"), rhs_spec=P(None, "tp"), contracting=((-1,), (-2,))) == want
    assert planned(lhs_spec=P(P.UNCONSTRAINED)) == planned()


def test_gemm_of_a_vector_and_a_scalar_result():
    made = planned((64,), (64,), P("tp"), P("tp"), ((0,), (0,)))
    assert made.out == ()
    [step] = made.steps
    assert (step.kind, step.axes) == ("psum", ("tp",))
