"""What moves, in bytes a device receives."""

import pytest

from shardops.rules.cost import moved_bytes, reduced_bytes
from shardops.rules.reduction import Reduction

SIZES = {"a": 2, "b": 4}


@pytest.mark.parametrize(
    ("have", "want", "elements"),
    [
        (((), ()), ((), ()), 0),
        (((), ()), (("a",), ("b",)), 0),  # a slice
        ((("a",), ()), ((), ()), 64),  # half of 128 is here
        (((), ("b",)), ((), ()), 96),  # a quarter is here
        ((("a",), ("b",)), (("a",), ()), 48),
        (((), ("b",)), (("b",), ()), 24),  # an all-to-all: a quarter of 32 is here
    ],
)
def test_moved_bytes(have, want, elements):
    assert moved_bytes((8, 16), have, want, SIZES) == elements
    assert moved_bytes((8, 16), have, want, SIZES, 4) == 4 * elements


def test_reduced_bytes():
    partial = ((), ())
    assert reduced_bytes((8, 16), partial, Reduction(), SIZES) == 0
    assert reduced_bytes((8, 16), partial, Reduction(all_reduce=("b",)), SIZES) == 2 * 96
    assert reduced_bytes((8, 16), partial, Reduction(scatter=((0, ("b",)),)), SIZES) == 96
    both = Reduction(scatter=((0, ("b",)),), all_reduce=("a",))
    assert reduced_bytes((8, 16), partial, both, SIZES) == 96 + 2 * 32 / 2
