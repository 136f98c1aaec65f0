"""One all-gather of a weight for both passes: where it is asked for, and kept by the policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import meshes
from tests.closeness import assert_shards_close

B, S, K, N = 8, 64, 64, 32  # many rows: the weight is what moves
GATHER, SCATTER = (1, 4 * K * N), (1, 4 * K * N // 2)


def program(gathered, policy):
    """Gradients of a product with a weight over dp; under jax.checkpoint with a policy."""

    def layer(w, x):
        if gathered:
            w = so.checkpoint_policies.gather(w, P())
        return so.gemm(x, w, batch_dims=((0,), ()))

    if policy != "no checkpoint":
        layer = jax.checkpoint(layer, policy=policy)

    def gradients(w, x, c):
        return jax.grad(lambda w, x: jnp.sum(layer(w, x) * c), (0, 1))(w, x)

    return jax.jit(gradients)


@pytest.mark.parametrize(
    ("gathered", "policy"),
    [
        (False, "no checkpoint"),
        (True, "no checkpoint"),
        (True, None),
        (True, so.checkpoint_policies.save_gathered),
    ],
    ids=["op", "gathered", "recomputed", "saved"],
)
def test_gradient_with_a_gathered_weight_is_right(rng, gathered, policy):
    """Only dx needs the weight here: the forward result is not used."""
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((K, N), (B, S, K), (B, S, N))]
    with meshes.entered("explicit") as mesh:
        placed = [meshes.place(mesh, a, "dp") for a in arrays]
        step = program(gathered, policy)
        found = hlo.summary(step.lower(*placed).compile())
        dw, dx = step(*placed)
    assert found == {"all-gather": GATHER, "reduce-scatter": SCATTER}
    w, x, c = (a.astype(np.float64) for a in arrays)
    assert_shards_close(dw, np.einsum("bsk,bsn->kn", x, c), reduced=B * S)
    assert_shards_close(dx, np.einsum("bsn,kn->bsk", c, w), reduced=N)


def test_policy_saves_the_gathered_weight_and_without_it_two_layers_gather_twice():
    """A sine between layers, so that the forward pass is needed, gathers and all; the backward pass
    gathers again unless the weights are saved."""

    def gathers(gathered, policy):
        def layer(w, x):
            if gathered:
                w = so.checkpoint_policies.gather(w, P())
            return jnp.sin(so.gemm(x, w, batch_dims=((0,), ())))

        remat = jax.checkpoint(layer, policy=policy)

        def loss(ws, x):
            return jnp.sum(jnp.sin(jax.lax.scan(lambda x, w: (remat(w, x), None), x, ws)[0]))

        with meshes.entered("explicit") as mesh:
            ws = meshes.place(mesh, jnp.ones((3, K, K)), None, "dp")
            x = meshes.place(mesh, jnp.ones((B, S, K)), "dp")
            compiled = jax.jit(jax.grad(loss)).lower(ws, x).compile()
        return hlo.summary(compiled)["all-gather"][0]

    # In a loop body each counts once: one gather in the forward body, one in the backward one.
    assert gathers(False, None) == 2
    assert gathers(True, None) == 2
    assert gathers(True, so.checkpoint_policies.save_gathered) == 1


def test_gather_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="a mesh of Explicit axes"):
        so.checkpoint_policies.gather(jnp.ones((4, 4)), P())
    with meshes.entered("explicit-auto"), pytest.raises(ValueError, match="Explicit axes alone"):
        so.checkpoint_policies.gather(jnp.ones((4, 4)), P())
    with meshes.entered("explicit"), pytest.raises(ValueError, match="rows"):
        so.checkpoint_policies.gather(jnp.ones((4, 4)), P("rows"))
