"""Transformations on Auto axes."""

import pytest

from tests.transforms import matrix


@pytest.mark.parametrize("route, transformation", matrix.cells("Auto", "partly manual, Auto"))
def test_cell(route, transformation):
    matrix.check(route, transformation)
