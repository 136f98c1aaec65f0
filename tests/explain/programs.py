"""Layouts of programs, their arguments and results."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from tests.moved import SHAPES

# name: x, w, y of x[B, S, K] w[K, N] -> y[B, S, N]
LAYOUTS = {
    "column": (("dp",), (None, "tp"), ("dp", None, "tp")),
    "row": (("dp", None, "tp"), ("tp",), ("dp",)),
    "row, scattered": (("dp", None, "tp"), ("tp",), ("dp", "tp")),
    "sequence": (("dp", "tp"), (None, "tp"), ("dp", None, "tp")),
    "fsdp": (("dp",), ("dp",), ("dp",)),
    "fsdp and tp": (("dp",), ("dp", "tp"), ("dp", None, "tp")),
    "two axes on k": ((None, None, ("dp", "tp")), (("dp", "tp"),), ()),
    "other axes on k": ((None, None, "dp"), ("tp",), ("dp",)),
    "swapped": (("tp", "dp"), ("dp", "tp"), ("dp", "tp")),
}


def placed(mesh, **layouts):
    return [meshes.place(mesh, jnp.ones(SHAPES[n]), *spec) for n, spec in layouts.items()]


def jitted(mesh, f, *out):
    """With the results' layouts, which on an Auto mesh no type says."""
    if not out or meshes.explicit_axes(mesh):
        return jax.jit(f)
    return jax.jit(f, out_shardings=tuple(NamedSharding(mesh, P(*spec)) for spec in out))
