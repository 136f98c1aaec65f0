"""Where no mesh matters, one device does: cheaper to compile, and fused alike."""

import pytest

from tests import meshes
from tests.fuse.programs import DIM, draw, parameters


@pytest.fixture
def one_device():
    with meshes.entered("auto", {"one": 1}):
        yield


@pytest.fixture
def x(rng):
    return draw(rng, 4, DIM)


@pytest.fixture
def p(rng):
    return parameters(rng)
