"""Small changes that would save more than 10 % of an op's bytes."""

import itertools

import pytest

from tests.explain.one_product import planned

DENSE = "b s k, k n -> b s n"


def test_row_parallel_with_a_free_result_is_told_to_shard_n():
    entry = planned(DENSE, "dp,,tp", "tp,")
    assert entry.suggestion.text == (
        "sharding rhs's n over tp instead of k saves the all-reduce at the price of an "
        "all-gather: 12.6 MB instead of 25.2 MB; out is then b@dp, n@tp"
    )
    assert entry.suggestion.array == "rhs"
    assert entry.suggestion.after == ((), ("tp",))
    assert entry.suggestion.saved == 0.5


def test_what_is_suggested_moves_what_is_promised():
    entry = planned(DENSE, "dp,,tp", "tp,")
    assert planned(DENSE, "dp,,tp", ",tp").bytes == entry.suggestion.bytes


def test_a_plan_that_moves_nothing_gets_none():
    assert planned(DENSE, "dp,,", ",tp", "dp,,tp").suggestion is None


def test_what_costs_memory_is_said_and_only_named_where_nothing_else_helps():
    entry = planned("m k, k n -> m n", "dp,", "dp,", "dp,", mesh={"dp": 8}, sizes={"m": 8192})
    text = entry.suggestion.text
    assert text.startswith("not sharding rhs's k over dp saves the all-gather: 0 B instead of ")
    assert text.endswith(", at 8 × the memory for rhs")


def test_a_change_of_the_wanted_result_is_worded_as_one():
    entry = planned(DENSE, "dp,,tp", "tp,", "dp,,", sizes={"k": 65536})
    assert entry.suggestion.array == "out"
    assert entry.suggestion.text.startswith("wanting the result's ")


def product(lhs, rhs, out, **sizes):
    return planned("m k, k n -> m n", lhs, rhs, out, sizes=sizes)


def test_fewer_bytes_for_more_work_are_no_suggestion():
    """With m over dp, dp is gathered from n: fewer bytes, and every device works for two."""
    entry = product(",dp", ",dp+tp", None, m=2048, k=128, n=8)
    tempting = product("dp,", ",dp+tp", None, m=2048, k=128, n=8)
    assert tempting.flops > entry.flops
    assert tempting.bytes < entry.suggestion.bytes < 0.9 * entry.bytes


def test_less_than_a_tenth_is_not_worth_a_suggestion():
    entry = product("dp,tp", ",dp", ",tp+dp", m=128, k=512, n=16)
    little = product("dp,tp", ",dp", "dp,tp", m=128, k=512, n=16)
    assert 0.9 * entry.bytes < little.bytes < entry.bytes
    assert entry.suggestion.text.startswith("not sharding rhs's n over dp")


def test_a_change_that_keeps_memory_goes_before_one_that_saves_more():
    entry = product(",tp", ",dp+tp", "dp,", m=2048, k=512, n=1024)
    copies = product(",", ",dp+tp", "dp,", m=2048, k=512, n=1024)
    assert copies.bytes < entry.suggestion.bytes < 0.9 * entry.bytes
    assert "memory" not in entry.suggestion.text


SPECS = ["dp,,tp", "dp,tp,", ",tp,dp", "tp,,", ",,"], [",tp", "tp,", "dp,tp", "tp,dp", ","]


@pytest.mark.parametrize("out", [None, "dp,,tp", "dp,tp,", ",,"])
def test_no_suggestion_saves_less_than_a_tenth_or_adds_work(out):
    count = 0
    for lhs, rhs in itertools.product(*SPECS):
        entry = planned(DENSE, lhs, rhs, out)
        if entry.suggestion is None:
            continue
        count += 1
        changed = dict(zip(("lhs", "rhs", "out"), (lhs, rhs, out), strict=True))
        spec = ",".join("+".join(d) for d in entry.suggestion.after)
        again = planned(DENSE, *{**changed, entry.suggestion.array: spec}.values())
        assert again.bytes == entry.suggestion.bytes < 0.9 * entry.bytes
        assert again.flops <= entry.flops
    assert count > 5
