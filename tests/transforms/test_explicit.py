"""Transformations on Explicit axes."""

import pytest

from tests.transforms import matrix


@pytest.mark.parametrize(
    "route, transformation", matrix.cells("Explicit", "mixed", "partly manual, Explicit")
)
def test_cell(route, transformation):
    matrix.check(route, transformation)
