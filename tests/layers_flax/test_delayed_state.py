"""State of delayed scaling in modules: microbatches (reported case 19), steps, checkpoints."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops.layers import linen, presets
from shardops.layers import nnx as of_nnx
from tests import cases, meshes

RULES = presets.tensor_sequence_parallel("tp", data="dp")
DELAYED = so.recipes.DelayedScaling(amax_history_len=4)
D = 32


def small(rng, *lead):
    return cases.random(rng, (*lead, D), "float32")


@pytest.mark.parametrize(
    ("framework", "kind"), [("nnx", "none"), ("linen", "auto"), ("nnx", "explicit")]
)
def test_microbatches_combine_their_magnitudes_by_maximum(framework, kind):
    """Two of largest magnitude 1 and 3, scanned: 3, not 4, in one entry of the history."""
    batches = jnp.stack([jnp.full((8, D), 1.0), jnp.full((8, D), 3.0)])
    if framework == "nnx":
        module = of_nnx.Dense(D, 16, recipe=DELAYED, rngs=nnx.Rngs(0))
        graph, state, params = nnx.split(module, of_nnx.QuantizerState, ...)

        def gradients(state, batches):
            def loss(state):
                model = of_nnx.watch(nnx.merge(graph, state, params))
                return jnp.sum(scanned(model, batches))

            return jax.grad(loss)(state)
    else:
        module = linen.Dense(16, recipe=DELAYED)
        variables = module.init(jax.random.key(0), batches[0])
        state = variables["_overwrite_with_gradient"]

        def gradients(state, batches):
            def loss(state):
                held = linen.watch({**variables, "_overwrite_with_gradient": state})
                return jnp.sum(scanned(lambda x: module.apply(held, x), batches))

            return jax.grad(loss)(state)

    def scanned(model, batches):
        return jax.lax.scan(lambda total, x: (total + model(x).sum(), None), 0.0, batches)[0]

    with meshes.entered(kind) if kind != "none" else contextlib.nullcontext() as mesh:
        if mesh is not None:
            batches = meshes.place(mesh, batches, None, ("dp", "tp"))
        new = jax.jit(gradients)(state, batches)
    histories = [a for a in jax.tree.leaves(new) if a.shape == (4,)]
    np.testing.assert_array_equal(histories[0], [3, 0, 0, 0])
    for leaf in jax.tree.leaves(new):
        assert leaf.sharding.is_fully_replicated


def test_a_step_of_nnx_updates_state_by_its_gradient(rng):
    """As the docstring of `watch` has it; histories roll once a step."""
    model = of_nnx.LayerNormMLP(D, 64, recipe=DELAYED, rngs=nnx.Rngs(0))
    x = small(rng, 2, 4)

    @nnx.jit
    def step(model, x):
        wrt = nnx.DiffState(0, (nnx.Param, of_nnx.QuantizerState))
        loss = lambda model, x: jnp.mean(of_nnx.watch(model)(x) ** 2)  # noqa: E731
        gradients = nnx.grad(loss, argnums=wrt)(model, x)
        nnx.update(model, nnx.filter_state(gradients, of_nnx.QuantizerState))

    for _ in range(2):
        step(model, x)
    of_kernel = model.up.quantizers.get_value().kernel
    largest = float(jnp.abs(model.up.kernel[...]).max())
    np.testing.assert_array_equal(of_kernel.amax_history, np.float32([largest, largest, 0, 0]))
    np.testing.assert_allclose(of_kernel.scale_inv, largest / 448, rtol=1e-6)


def test_orbax_restores_a_run_bit_by_bit(rng, tmp_path):
    """Parameters and state of delayed scaling, saved and restored between two steps."""
    module = linen.LayerNormMLP(64, recipe=DELAYED)
    x = small(rng, 2, 8)
    variables = nn.unbox(module.init(jax.random.key(0), x))

    @jax.jit
    def step(variables):
        grads = jax.grad(lambda v: (module.apply(linen.watch(v), x) ** 2).mean())(variables)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads["params"])
        return {**grads, "params": params}

    first = step(step(variables))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", first)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", first)
    jax.tree.map(np.testing.assert_array_equal, step(restored), step(first))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_orbax_restores_nnx_modules_from_their_abstract_ones(rng, tmp_path, kind):
    """On a mesh: where each array lies is what Flax says of the module, without one being made."""

    def make():
        return of_nnx.LayerNormMLP(D, 64, recipe=DELAYED, rules=RULES, rngs=nnx.Rngs(0))

    with meshes.entered(kind) as mesh:
        state = nnx.state(make())
        state = jax.tree.map(lambda a: a + 1, state)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
        _, abstract = nnx.get_abstract_model(make, mesh)
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "state", abstract)
        shapes = nnx.state(nnx.eval_shape(make))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert meshes.same(restored["up"]["kernel"].get_value().sharding.spec, P(None, "tp"))
    scale_inv = restored["up"]["quantizers"].get_value().input.scale_inv
    assert scale_inv.sharding.is_fully_replicated
