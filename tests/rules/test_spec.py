"""The spec algebra, the scale rule and Shardy's text."""

import pytest
from jax.sharding import PartitionSpec as P

from shardops.rules import scale_shape, scale_spec
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.shardy import gemm_factors, rule
from shardops.rules.spec import (
    common_prefix,
    cut_before,
    fit,
    local_shape,
    only,
    to_partition_spec,
    to_spec,
)

SIZES = {"a": 2, "b": 4, "one": 1}


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        (None, ((), (), ())),
        (P(), ((), (), ())),
        (P("a"), (("a",), (), ())),
        (P(None, ("a", "b")), ((), ("a", "b"), ())),
        (("a", "a", ("a", "b")), (("a",), (), ("b",))),
        (P(P.UNCONSTRAINED, "a"), ((), ("a",), ())),
    ],
)
def test_to_spec(given, spec):
    assert to_spec(given, 3) == spec


def test_spec_round_trip():
    spec = (("a",), (), ("b", "one"))
    assert to_spec(to_partition_spec(spec), 3) == spec
    assert to_partition_spec(spec) == P("a", None, ("b", "one"))


def test_to_spec_refuses_too_many_entries():
    with pytest.raises(ValueError, match="has 2 entries; expected at most 1"):
        to_spec(P("a", "b"), 1)


@pytest.mark.parametrize(
    ("axes", "size", "unit", "fitting"),
    [
        (("a", "b"), 8, 1, ("a", "b")),
        (("a", "b"), 12, 1, ("a",)),
        (("a", "b"), 16, 2, ("a", "b")),
        (("a", "b"), 8, 2, ("a",)),
        (("b",), 30, 1, ()),
        (("one", "b"), 3, 1, ("one",)),
        (("a", "b"), 0, 1, ("a", "b")),
    ],
)
def test_fit_keeps_axes_that_divide(axes, size, unit, fitting):
    assert fit(axes, size, SIZES, unit) == fitting


def test_cut_common_only_local_shape():
    assert cut_before(("a", "b", "c"), ("b",)) == ("a",)
    assert cut_before(("a", "b"), ()) == ("a", "b")
    assert common_prefix(("a", "b"), ("a", "c")) == ("a",)
    assert only((("a", "b"), ("c",)), "ac") == (("a",), ("c",))
    assert local_shape((8, 8, 3), (("a", "b"), ("a",), ()), SIZES) == (1, 4, 3)


@pytest.mark.parametrize(
    ("shape", "spec", "block", "scales", "scale_at"),
    [
        ((8, 64), (("a",), ("b",)), None, (), ()),
        ((8, 256), (("a",), ("b",)), (1, 32), (8, 8), (("a",), ("b",))),
        ((8, 64), (("a",), ("b",)), (1, 32), (8, 2), (("a",), ())),  # 16 columns a device
        ((33, 96), ((), ("a",)), (1, 32), (33, 3), ((), ())),  # 48 columns a device
        ((512, 1024), (("a",), ("b",)), (128, 128), (4, 8), (("a",), ("b",))),
        ((11008, 8), (("b",), ()), (128, 1), (86, 8), ((), ())),
    ],
)
def test_scales_follow_whole_blocks_only(shape, spec, block, scales, scale_at):
    assert scale_shape(shape, block) == scales
    assert scale_spec(shape, spec, block, SIZES) == scale_at


def test_gemm_factors():
    dims = GemmDims((8, 16, 32), (32, 64), (2,), (0,))
    ins, outs = gemm_factors(dims, bias=True, add=True, results=1)
    assert rule([*ins, []], outs) == "l0 l1 k0, k0 r1, c1, l0 l1 r1,  -> l0 l1 r1"
    dims = GemmDims((2, 3, 4), (4, 5, 2), (2,), (0,), (0,), (2,))
    ins, outs = gemm_factors(dims, bias=False, add=False, results=2)
    assert rule(ins, outs) == "b0 l1 k0, k0 r1 b0 -> b0 l1 r1, b0 l1 r1"
