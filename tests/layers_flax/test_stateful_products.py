"""State of delayed scaling in models whose products are `linen.DotGeneral`."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.layers import linen, maxtext
from tests import cases, meshes

B, S, D = 2, 5, 32


def test_a_class_of_a_recipe_keeps_its_state_where_training_loops_look(rng):
    """The gradient of the collection is the state of the next step."""
    recipe = so.recipes.DelayedScaling(amax_history_len=4)
    x = cases.random(rng, (B, S, D), "float32")
    module = nn.Dense(16, dot_general_cls=functools.partial(linen.DotGeneral, recipe=recipe))
    variables = module.init(jax.random.key(0), x)
    step = jax.jit(jax.grad(lambda v: (module.apply(v, x) ** 2).sum()))
    state = step(variables)["_overwrite_with_gradient"]["DotGeneral_0"]
    np.testing.assert_array_equal(state["input_amax_history"], [np.abs(x).max(), 0, 0, 0])
    kernel = variables["params"]["kernel"]
    np.testing.assert_array_equal(state["kernel_amax_history"][0], np.abs(kernel).max())
    assert state["gradient_amax_history"][0] > 0


DELAYED = so.recipes.DelayedScaling(amax_history_len=4)


class OfMaxText(nn.Module):
    """A layer that asks a quantisation for its product, as MaxText's do, twice a call."""

    @nn.compact
    def __call__(self, x):
        product = maxtext.Quantization(DELAYED).dot_general_cls(mesh_axes=("embed", "mlp"))()
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (D, D))
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        return product(product(x, kernel, numbers), kernel, numbers)


DENSE = nn.Dense(8, dot_general_cls=functools.partial(linen.DotGeneral, recipe=DELAYED))


@pytest.mark.parametrize(
    ("module", "kind"), [(DENSE, "none"), (DENSE, "auto"), (OfMaxText(), "none")]
)
def test_products_of_several_microbatches_combine_by_maximum_and_roll_once(module, kind):
    """Magnitudes 1, 3 and 2, in a scan: 3, in one entry of the history."""
    batches = jnp.ones((3, 8, D)) * jnp.array([1.0, 3.0, 2.0])[:, None, None]
    variables = module.init(jax.random.key(0), batches[0])

    def total(variables, batches):
        one = lambda total, x: (total + module.apply(variables, x).sum(), None)  # noqa: E731
        return jax.lax.scan(one, 0.0, batches)[0]

    def step(variables, batches):
        loss = lambda v: total(linen.watch(v, recipe=DELAYED), batches)  # noqa: E731
        new = jax.grad(loss)(variables)["_overwrite_with_gradient"]
        return {**variables, "_overwrite_with_gradient": new}

    with contextlib.nullcontext() if kind == "none" else meshes.entered(kind) as mesh:
        if mesh is not None:
            batches = meshes.place(mesh, batches, None, ("dp", "tp"))
        after = jax.jit(lambda v, xs: step(step(v, xs), xs / 2))(variables, batches)
    state = after["_overwrite_with_gradient"]["DotGeneral_0"]
    assert jax.tree.structure(after) == jax.tree.structure(variables)
    largest = np.abs(variables["params"]["kernel"]).max()
    np.testing.assert_array_equal(state["kernel_amax_history"], [largest, largest, 0, 0])
    if module is DENSE:
        np.testing.assert_array_equal(state["input_amax_history"], [1.5, 3, 0, 0])
    assert (state["input_amax_history"] > 0).tolist() == [True, True, False, False]


def test_microbatches_that_nobody_watches_are_refused():
    x = jnp.ones((2, 8, D))
    variables = DENSE.init(jax.random.key(0), x[0])

    def scanned(variables):
        one = lambda total, x: (total + DENSE.apply(variables, x).sum(), None)  # noqa: E731
        return jax.lax.scan(one, 0.0, x)[0]

    def shared(variables):
        return sum(DENSE.apply(variables, batch).sum() for batch in x)

    for loss, said in ((scanned, "of outside of the scan"), (shared, "watched a second time")):
        with pytest.raises(ValueError, match=rf"watch: quantizers is {said}.*linen\.watch"):
            jax.jit(jax.grad(loss))(variables)
    other = so.recipes.DelayedScaling(amax_history_len=8)
    said = r"watch: delayed state DotGeneral_0\.input is .* of 4 steps; expected .* of 8 steps"
    with pytest.raises(ValueError, match=said):
        jax.jit(lambda v: linen.watch(v, recipe=other))(variables)
    with pytest.raises(ValueError, match=r"watch: recipe is CurrentScaling.*a recipe with state"):
        linen.watch(variables, recipe=so.recipes.CurrentScaling())
    for given in (None, DENSE, [variables]):
        with pytest.raises(TypeError, match=r"watch: variables is a .*; expected what module.init"):
            linen.watch(given)
