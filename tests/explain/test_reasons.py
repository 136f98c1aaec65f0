"""The one sentence that says why a product moves what it moves, on everyday layouts."""

import pytest

from tests.explain.one_product import planned

DENSE = "b s k, k n -> b s n"
SCORES = "b h q e, b h k e -> b h q k"

# name: einsum, lhs, rhs, out, sentence
EVERYDAY = {
    "column parallel": (
        DENSE,
        "dp,,",
        ",tp",
        "dp,,tp",
        "k is whole on both, dp shards b of lhs and tp shards n of rhs: nothing moves.",
    ),
    "row parallel": (
        DENSE,
        "dp,,tp",
        "tp,",
        "dp,,",
        "k is sharded over tp on both: partial sums; result wanted whole over tp, so all-reduce.",
    ),
    "row parallel, free result": (
        DENSE,
        "dp,,tp",
        "tp,",
        None,
        "k is sharded over tp on both: partial sums; no sharding is asked of the result, "
        "so all-reduce.",
    ),
    "row parallel, sequence-sharded result": (
        DENSE,
        "dp,,tp",
        "tp,",
        "dp,tp,",
        "k is sharded over tp on both: partial sums; result wanted s@tp, so reduce-scatter.",
    ),
    "row parallel, cheapest result": (
        DENSE,
        "dp,,tp",
        "tp,",
        "cheapest",
        "k is sharded over tp on both: partial sums; the result may stay b@dp+tp, "
        "so reduce-scatter.",
    ),
    "sequence parallel": (
        DENSE,
        "dp,tp,",
        ",tp",
        "dp,,tp",
        "tp shards s of lhs and n of rhs, but one dim of the result only: lhs is gathered over tp.",
    ),
    "FSDP, weight sharded along n": (
        DENSE,
        "dp,,",
        ",dp",
        "dp,,",
        "dp shards n of rhs and b of lhs, but one dim of the result only: rhs is gathered over dp.",
    ),
    "FSDP, weight sharded along k": (
        DENSE,
        "dp,,",
        "dp,",
        "dp,,",
        "dp shards k of rhs but b of lhs: rhs is gathered over dp.",
    ),
    "decode, a weight over both axes": (
        "m k, k n -> m n",
        ",",
        "dp,tp",
        None,
        "lhs is cut over dp along k to match rhs; k is then sharded over dp on both: "
        "partial sums; no sharding is asked of the result, so all-reduce.",
    ),
    "two axes on k": (
        "m k, k n -> m n",
        ",dp+tp",
        "dp+tp,",
        ",",
        "k is sharded over dp+tp on both: partial sums; result wanted whole over dp+tp, "
        "so all-reduce.",
    ),
    "two axes on k, of which one sum costs more than a gather": (
        DENSE,
        ",,dp+tp",
        "dp+tp,",
        ",,",
        "tp moves from k to b of lhs, which moves less than to gather lhs: all-to-all; "
        "k is sharded over tp on both, but to sum costs more: rhs is gathered over tp; "
        "k is then sharded over dp on both: partial sums; "
        "result wanted whole over dp, so all-reduce; "
        "result wanted whole over tp along b, so all-gather.",
    ),
    "attention scores": (
        SCORES,
        "dp,tp,,",
        "dp,tp,,",
        "dp,tp,,",
        "e is whole on both, dp shards b of both and tp shards h of both: nothing moves.",
    ),
    "nothing sharded": (
        DENSE,
        ",,",
        ",",
        None,
        "both operands are whole on every device, so nothing moves.",
    ),
    "nothing sharded, a result that is": (
        DENSE,
        ",,",
        ",",
        "dp,,tp",
        "lhs is cut over dp along b, where the result is wanted; rhs is cut over tp along n, "
        "where the result is wanted; nothing moves.",
    ),
}


@pytest.mark.parametrize("layout", EVERYDAY.values(), ids=EVERYDAY)
def test_reason_of_an_everyday_layout(layout):
    *product, sentence = layout
    assert planned(*product).reason == sentence


def test_reason_of_a_dim_that_does_not_divide():
    entry = planned("m k, k n -> m n", "tp,", ",", sizes={"m": 5})
    assert "m of lhs has 5 elements, not a multiple of 4: lhs is gathered over tp" in entry.reason
    assert entry.bytes == 2 * 5 * 4096 * 3 / 4


def test_reason_names_every_collective():
    """No step of a plan goes unsaid: mismatched axes, three of them, in any order."""
    words = {
        "all_gather": ("gather",),
        "all_to_all": ("all-to-all",),
        "ppermute": ("change places",),
        "psum": ("all-reduce",),
        "psum_scatter": ("reduce-scatter",),
        "slice": ("cut", "slice"),
    }
    specs = [
        (",a,b+c", "c+b,a"),
        ("a+b,,c", "b,c"),
        (",,a+b", "b+a,c"),
        ("c,b,a", "a,b"),
        ("a,,", "b,a"),
    ]
    seen = set()
    for lhs, rhs in specs:
        for out in (None, "a,b,c", "c,,a+b", ",,", "b+a,,"):
            entry = planned("b s k, k n -> b s n", lhs, rhs, out, mesh={"a": 2, "b": 2, "c": 2})
            for step in entry.steps:
                seen.add(step.kind)
                assert any(w in entry.reason for w in words[step.kind]), (step, entry.reason)
    assert seen >= {"all_gather", "all_to_all", "psum_scatter", "slice"}
