"""Transformations without axes to partition over: no mesh, or every axis mapped."""

import pytest

from tests.transforms import matrix


@pytest.mark.parametrize("route, transformation", matrix.cells("none", "shard_map"))
def test_cell(route, transformation):
    matrix.check(route, transformation)
