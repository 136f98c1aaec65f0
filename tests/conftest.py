"""Eight virtual CPU devices, warnings as errors, seeded inputs, and the meshes of the tests."""

import os
import zlib

# Before JAX starts its backend. A run on GPUs sets JAX_PLATFORMS itself, and keeps it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest

from tests import meshes

# The same examples in every run: a failure on one machine is a failure on all.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, print_blob=False
)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    # In front, so that what pyproject.toml or a test says about a warning still counts.
    filters = ["error"]
    # What other packages do while they are imported is not ours to fix.
    filters += [f"default:::{package}" for package in ("flax", "orbax", "optax", "tensorstore")]
    config.getini("filterwarnings")[:0] = filters


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ between tests and never between runs."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest):
    """A (2, 4) mesh of axes dp, tp, entered: all Auto, then all Explicit."""
    with meshes.entered(request.param) as entered:
        yield entered


@pytest.fixture(params=["auto", "explicit", "explicit-auto", "auto-explicit"])
def any_mesh(request: pytest.FixtureRequest):
    """The (2, 4) mesh with every mix of axis types."""
    with meshes.entered(request.param) as entered:
        yield entered


@pytest.fixture
def auto_mesh():
    with meshes.entered("auto") as entered:
        yield entered


@pytest.fixture
def explicit_mesh():
    with meshes.entered("explicit") as entered:
        yield entered


@pytest.fixture(params=["none", "auto", "explicit"])
def put(request: pytest.FixtureRequest):
    """Places an array by a layout that only a mesh looks at: without one, then on each kind."""
    if request.param == "none":
        yield lambda array, *spec: jnp.asarray(array)
        return
    with meshes.entered(request.param) as mesh:
        yield lambda array, *spec: meshes.place(mesh, array, *spec)
