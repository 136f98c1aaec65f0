"""The report as text, its figures in words, and its predicted times."""

import pytest

from shardops.explaining import timing, wording
from shardops.explaining.report import Report
from shardops.rules.hardware import LINKS, Link
from shardops.rules.step import Step
from tests.explain.one_product import planned

ROW = """\
shardops report: mesh dp=2, tp=4; nvlink4: 261 GB/s, 4.0 µs and 1.0 µs a hop

1. gemm, forward
   lhs         bfloat16[b 8@dp, s 512, k 4096@tp]
   rhs         bfloat16[k 4096@tp, n 4096]
   out         bfloat16[b 8@dp, s 512, n 4096]
   step        all-reduce of out over tp: 25.2 MB, 106.4 µs
   moves       25.2 MB in 106.4 µs; the product 17.2 GFLOP in 21.5 µs
   why         k is sharded over tp on both: partial sums; no sharding is asked of the result, \
so all-reduce.
   suggestion  sharding rhs's n over tp instead of k saves the all-reduce at the price of an \
all-gather: 12.6 MB instead of 25.2 MB; out is then b@dp, n@tp

total: 25.2 MB in 106.4 µs
note: a note"""


def test_text_of_a_row_parallel_product():
    entry = planned("b s k, k n -> b s n", "dp,,tp", "tp,")
    assert str(Report((entry,), notes=("a note",))) == ROW


def test_text_says_where_operands_are_used_and_what_moves_nothing():
    entry = planned("m k, k n -> m n", ",", "dp,tp")
    text = str(Report((entry,)))
    assert "lhs         bfloat16[m 64, k 4096], used as k@dp" in text
    assert "step        slice of lhs over dp along k: no bytes" in text
    local = str(Report((planned("m k, k n -> m n", "dp,", ",tp"),)))
    assert "moves       nothing between devices; the product " in local
    assert "suggestion" not in local


def test_text_of_nothing():
    assert "total: 0 B in 0.0 µs" in str(Report(()))


def test_plain_data_has_the_same_figures():
    entry = planned("b s k, k n -> b s n", "dp,,tp", "tp,")
    data = Report((entry,)).to_dict()
    assert data["bytes"] == data["ops"][0]["bytes"] == entry.bytes == 2 * 2 * 4 * 512 * 4096 * 3 / 4
    assert data["ops"][0]["steps"][0]["kind"] == "all-reduce"
    assert data["ops"][0]["operands"][0]["spec"] == [["dp"], [], ["tp"]]
    assert data["ops"][0]["suggestion"]["spec"] == [[], ["tp"]]
    assert data["link"]["name"] == "nvlink4"
    assert data["compiled_bytes"] is None


@pytest.mark.parametrize(
    "count, says",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12582912, "12.6 MB"),
        (2.5e9, "2.5 GB"),
        (3e14, "300 TB"),
    ],
)
def test_sizes_in_words(count, says):
    assert wording.size(count) == says


def test_times_and_operations_in_words():
    assert wording.time(31.04) == "31.0 µs"
    assert wording.time(2500) == "2.5 ms"
    assert wording.operations(17.18e9) == "17.2 GFLOP"
    assert wording.operations(512) == "512 FLOP"


RING = Link("ring", 1e9, 1e-6, 1e12)


@pytest.mark.parametrize(
    "kind, hops",
    [
        ("slice", 0),
        ("all_gather", 7),
        ("all_to_all", 7),
        ("ppermute", 1),
        ("psum", 14),
        ("psum_scatter", 7),
    ],
)
def test_a_step_takes_its_bytes_over_the_link_and_a_latency_a_hop(kind, hops):
    step = Step(kind, ("dp", "tp"), (), (), 2000.0)
    assert timing.hops(step, {"dp": 2, "tp": 4, "pp": 3}) == hops
    assert timing.microseconds(step, {"dp": 2, "tp": 4}, RING) == pytest.approx(2 + hops)


def test_a_slower_link_takes_longer():
    entry = planned("b s k, k n -> b s n", "dp,,tp", "tp,")
    (step,) = entry.steps
    sizes = {"dp": 2, "tp": 4}
    fast, slow = (timing.microseconds(step, sizes, LINKS[n]) for n in ("nvlink4", "pcie5"))
    assert slow > 3 * fast
    with pytest.raises(ValueError, match=r"link is 'string'; expected one of nvlink4, pcie5"):
        timing.link_named("string")
