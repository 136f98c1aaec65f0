"""The choice among cuBLASLt's candidates, on what an H200 took for them."""

import json
from pathlib import Path
from statistics import mean

import pytest

from shardops.kernels.gemm_ranking import preferred

MEASURED = json.loads(Path(__file__).with_name("gemm_candidates.json").read_text())["products"]
BFLOAT16, E4M3, FLOAT32 = 14, 28, 0
LARGE = {"m": 4096, "n": 4096, "k": 4096, "type": BFLOAT16, "out_type": BFLOAT16}
TMA = 66


def candidate(tile, waves, *, kernel=TMA, split=1):
    return {"kernel": kernel, "tile": tile, "split": split, "waves": waves}


# The last wave of the first is nearly empty, that of the second full.
FIRST, SECOND = candidate(24, 12.1), candidate(24, 16.0)


def gain(product):
    """Of the choice over the first, in time."""
    m, n, k = product["mnk"]
    found = [candidate(t, w, kernel=kind, split=s) for kind, t, s, w, _ in product["candidates"]]
    times = [row[-1] for row in product["candidates"]]
    chosen = found.index(preferred(found, {**LARGE, "m": m, "n": n, "k": k}))
    return times[0] / times[chosen]


@pytest.mark.parametrize("product", MEASURED, ids=lambda p: "x".join(map(str, p["mnk"])))
def test_no_measured_product_gets_slower(product):
    assert gain(product) >= 1


def test_measured_products_get_faster():
    """The best of all candidates of each would gain 1.0205."""
    gains = [gain(product) for product in MEASURED]
    assert len(gains) == 10
    assert mean(gains) > 1.0195
    assert max(gains) > 1.08


def test_a_fuller_last_wave_is_taken():
    assert preferred([FIRST, SECOND], LARGE) is SECOND
    assert preferred([SECOND, FIRST], LARGE) is SECOND
    assert preferred([FIRST], LARGE) is FIRST
    nearly = candidate(24, 12.98)
    assert preferred([nearly, SECOND], LARGE) is nearly  # a hundredth is not worth it


def test_small_tiles_are_for_short_products():
    small = candidate(29, 13.0)
    first = candidate(24, 13.0)
    assert preferred([first, small], LARGE) is first
    assert preferred([first, small], {**LARGE, "k": 256}) is small
    assert preferred([first, small], {**LARGE, "type": E4M3}) is small  # bytes count


@pytest.mark.parametrize("k", [1, 8, 16, 64])
def test_the_shortest_products_take_full_waves_too(k):
    emptiest, full = candidate(29, 1.05), candidate(29, 2.0)
    assert preferred([emptiest, full], {**LARGE, "k": k}) is full
    assert preferred([full, emptiest], {**LARGE, "k": k}) is full


@pytest.mark.parametrize(
    "other",
    [
        candidate(24, 16.0, kernel=24),
        candidate(24, 16.0, split=2),
        candidate(7, 16.0),
        candidate(24, 0.9),
        candidate(-1, 16.0),
    ],
    ids=["kernel", "split", "tile", "less than a wave", "unknown"],
)
def test_what_was_not_measured_is_left_to_the_heuristic(other):
    assert preferred([FIRST, other], LARGE) is FIRST
    assert preferred([other, SECOND], LARGE) is other


@pytest.mark.parametrize(
    "change",
    [
        {"type": FLOAT32, "out_type": FLOAT32},
        {"out_type": FLOAT32},
        {"type": E4M3, "scale_a": 2, "scale_b": 3},
        {"sm_count": 100},
    ],
    ids=str,
)
def test_other_products_are_left_to_the_heuristic(change):
    assert preferred([FIRST, SECOND], {**LARGE, **change}) is FIRST
