"""Where no mesh matters, one device does: cheaper to compile, and fused alike."""

import pytest

from tests import meshes


@pytest.fixture
def one_device():
    with meshes.entered("auto", {"one": 1}):
        yield
