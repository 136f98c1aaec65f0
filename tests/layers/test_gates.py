"""Gates of layer_norm_mlp whose kernel or cotangent lies in an unusual way."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import cases, meshes
from tests.closeness import assert_shards_close

D, F = 128, 256


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_a_quantised_gate_whose_cotangent_moves_is_the_unsharded_one(rng, kind):
    """Few tokens, a kernel cut along d: it is the gate's cotangent that is gathered, with the dim
    of the pair."""
    x = cases.random(rng, (8, D), "float32")
    up, down = (cases.random(rng, s, "float32", 0.1) for s in ((D, 2, F), (F, D)))
    qs = (so.recipes.CurrentScaling().dense_quantizers(),) * 2

    def gradients(x, up, down, **options):
        def loss(x, up, down):
            y = so.layer_norm_mlp(
                x,
                jnp.ones(D),
                (up, down),
                norm="rms_norm",
                activation=("silu", "linear"),
                quantizers=qs,
                **options,
            )
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, up, down)

    want = gradients(x, up, down)
    with meshes.entered(kind, {"dp": 4}) as mesh:
        placed = [meshes.place(mesh, a, "dp") for a in (x, up)]
        rows = P("dp", None)
        down = meshes.place(mesh, down, None, "dp")
        got = gradients(*placed, down, hidden_sharding=rows, out_sharding=rows)
    for name, one, other in zip(("x", "up", "down"), got, want, strict=True):
        assert_shards_close(one, other, reduced=D + F, roundings=4, what=name)


def test_a_gate_whose_parts_lie_apart_is_the_unsharded_one(rng):
    """Both parts of an element meet: the kernel is gathered along the dim of the pair, its gradient
    lies as it does."""
    x = cases.random(rng, (4, D), "float32")
    up, down = (cases.random(rng, s, "float32", 0.1) for s in ((D, 2, F), (F, D)))

    @jax.jit
    def step(x, up, down):
        def loss(up):
            y = so.layer_norm_mlp(x, jnp.ones(D), (up, down), activation=("gelu", "linear"))
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, has_aux=True)(up)

    want = step(x, up, down)
    with meshes.entered("explicit", {"tp": 2}) as mesh:
        up = meshes.place(mesh, up, None, "tp")
        got = step(x, up, down)
        assert meshes.same(got[0].sharding.spec, up.sharding.spec)
    for name, one, other in zip(("up", "y"), got, want, strict=True):
        assert_shards_close(one, other, reduced=D + F, roundings=2, what=name)
