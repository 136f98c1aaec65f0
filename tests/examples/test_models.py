"""The demo's model, and the one of Flax's own layers that benchmarks/train.py times beside it."""

import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from flax_model import FlaxModel
from lm import plain, training
from lm.model import Functional, Sizes, functional

SIZES = Sizes(dim=32, layers=2, heads=4, seq=16, vocabulary=128)
MODELS: dict[str, Callable[[], Functional]] = {
    "shardops": lambda: functional(SIZES, recipe="none", dtype="float32"),
    "flax": lambda: Functional(lambda: FlaxModel(SIZES, dtype=jnp.float32, rngs=nnx.Rngs(0))),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_is_that_of_plain_jnp(make: Callable[[], Functional]) -> None:
    """Loss and gradients of the same parameters, none of them at its initial zero or one."""
    model = make()
    rng = np.random.default_rng(3)
    params = training.initial_state(model, SIZES.layers, seed=1)["params"]
    params = jax.tree.map(lambda a: a + 0.1 * rng.standard_normal(a.shape, np.float32), params)
    inputs, targets = rng.integers(0, SIZES.vocabulary, (2, 3, SIZES.seq))
    loss, grads = jax.jit(jax.value_and_grad(model.loss))(params, {}, inputs, targets)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), params)
        wanted = jax.jit(jax.value_and_grad(plain.loss))(wide, inputs, targets)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    for path, grad in jax.tree.leaves_with_path(grads):
        want = wanted[1]
        for entry in path:
            want = want[entry.key]
        np.testing.assert_allclose(grad, want, rtol=2e-4, atol=2e-6, err_msg=str(path))


def test_their_parameters_have_the_same_names_and_shapes() -> None:
    """So that both start from the same numbers."""
    ours, flax = (make().shapes for make in MODELS.values())
    assert jax.tree.map(lambda a: a.shape, ours) == jax.tree.map(lambda a: a.shape, flax)
