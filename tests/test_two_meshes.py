"""Two meshes of the same axes in another order in one process."""

import jax
import numpy as np
import pytest
from jax import P

import shardops as so
from tests import meshes

LAYOUTS = {
    "two dims change": (P("tp", "dp"), P(None, "dp"), P(("dp", "tp"), None)),
    "an order changes": (P(("tp", "dp"), None), P(None, None), P(("dp", "tp"), None)),
    "an operand's contracted dim": (P("tp", None), P("dp", None), P("dp", "tp")),
}


@pytest.fixture
def other_order():
    """What JAX knows of the axes in scope, kept from a program over the other mesh.

    It interns that, and two orders of the same axes are one to it: while this is alive, a look at
    the scope says this order. Private, since nothing public keeps it alive for sure.
    """
    from jax._src.core import get_axis_env

    kept = []

    def look(shard):
        kept.append(get_axis_env())
        return shard

    with jax.set_mesh(meshes.make("auto", {"tp": 4, "dp": 2})):
        jax.jit(jax.shard_map(look, in_specs=P("tp"), out_specs=P("tp"))).lower(np.ones(4))
    return kept


@pytest.mark.parametrize(("x_spec", "w_spec", "wanted"), LAYOUTS.values(), ids=LAYOUTS)
def test_axes_are_in_the_order_of_their_mesh(
    other_order, mesh, rng, x_spec, w_spec, wanted
) -> None:
    x, w = (np.float32(rng.standard_normal(s)) for s in ((32, 16), (16, 48)))
    placed = meshes.place(mesh, x, *x_spec), meshes.place(mesh, w, *w_spec)
    got = jax.jit(lambda x, w: so.gemm(x, w, out_sharding=wanted))(*placed)
    np.testing.assert_allclose(got, x @ w, rtol=1e-4, atol=1e-4)
