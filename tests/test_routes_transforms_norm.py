"""The norms under JAX's transformations, without a mesh and on Auto and Explicit ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import cases, references
from tests.closeness import assert_close, assert_shards_close

OPS = ("layer_norm", "rms_norm")
both = pytest.mark.parametrize("op", OPS)

# of x and gamma (and beta, which goes with gamma)
IN_AXES = [((0, None), 0), ((2, None), 1), ((None, 0), 0), ((0, 0), 0), ((1, 1), -1)]


def _apply(op, x, gamma, **options):
    parameters = (gamma, gamma) if op == "layer_norm" else (gamma,)
    return getattr(so, op)(x, *parameters, **options)


def _reference(op, x, gamma):
    parameters = (gamma, gamma) if op == "layer_norm" else (gamma,)
    return getattr(references, f"{op}_reference")(x, *parameters).y


def _examples(array, axis):
    return itertools.repeat(array, 4) if axis is None else np.moveaxis(array, axis, 0)


def _batched(rng, shape, axis):
    at = len(shape) if axis == -1 else axis
    return cases.random(rng, shape if axis is None else (*shape[:at], 4, *shape[at:]))


@both
@pytest.mark.parametrize("in_axes, out_axes", IN_AXES)
def test_norm_vmap(rng, put, op, in_axes, out_axes):
    x, gamma = (_batched(rng, s, a) for s, a in zip(((8, 32), (32,)), in_axes, strict=True))
    f = jax.vmap(lambda x, g: _apply(op, x, g), in_axes, out_axes)
    got = jax.jit(f)(put(x), put(gamma))
    each = zip(_examples(x, in_axes[0]), _examples(gamma, in_axes[1]), strict=False)
    want = np.stack([_reference(op, x, g) for x, g in each], out_axes)
    assert_close(got, want, reduced=32)


@both
@pytest.mark.parametrize("in_axes, out_axes", IN_AXES)
def test_norm_vmap_of_gradient(rng, put, op, in_axes, out_axes):
    x, gamma = (_batched(rng, s, a) for s, a in zip(((8, 32), (32,)), in_axes, strict=True))
    dy, dh = cases.random(rng, (8, 32)), cases.random(rng, (8, 32))

    def gradients(x, gamma, dy, dh):
        def loss(x, gamma):
            y, h = _apply(op, x, gamma, return_input=True)
            return jnp.sum(y * dy) + jnp.sum(h * dh)

        return jax.grad(loss, (0, 1))(x, gamma)

    got = jax.jit(jax.vmap(gradients, (*in_axes, None, None)))(*map(put, (x, gamma, dy, dh)))
    vjp = getattr(references, f"{op}_vjp_reference")
    each = zip(_examples(x, in_axes[0]), _examples(gamma, in_axes[1]), strict=False)
    want = [vjp(dy, x, g, dh=dh) for x, g in each]
    assert_close(got[0], np.stack([w.x for w in want]), reduced=32, what="x")
    both_parameters = [w.gamma + (w.beta if op == "layer_norm" else 0) for w in want]
    assert_close(got[1], np.stack(both_parameters), reduced=64, roundings=2, what="gamma")


@both
def test_norm_vmap_nested(rng, put, op):
    x, gamma = cases.random(rng, (4, 8, 32)), cases.random(rng, (2, 32))
    pairs = jax.vmap(jax.vmap(lambda x, g: _apply(op, x, g), (None, 0)), (0, None))
    got = jax.jit(pairs)(put(x), put(gamma))
    want = np.stack([[_reference(op, a, g) for g in gamma] for a in x])
    assert_close(got, want, reduced=32)


@both
def test_norm_vmap_of_a_sharded_dim(rng, put, op):
    x, gamma = cases.random(rng, (8, 4, 32)), cases.random(rng, (32,))
    got = jax.jit(jax.vmap(lambda x, g: _apply(op, x, g), (0, None)))(put(x, "dp"), put(gamma))
    assert_shards_close(got, _reference(op, x, gamma), reduced=32)


def _plain(op, x, gamma):
    centred = x - jnp.mean(x, -1, keepdims=True) if op == "layer_norm" else x
    y = centred / jnp.sqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-6) * gamma
    return y + gamma if op == "layer_norm" else y


def _bare(f, *arrays):
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.jit(f)(*arrays)


@both
def test_norm_jacobian(rng, put, op):
    x, gamma = cases.random(rng, (2, 6)), cases.random(rng, (6,))
    got = jax.jit(jax.jacrev(lambda x, g: _apply(op, x, g), (0, 1)))(put(x), put(gamma))
    want = _bare(jax.jacrev(lambda x, g: _plain(op, x, g), (0, 1)), x, gamma)
    for one, other in zip(got, want, strict=True):
        assert_close(one, np.asarray(other), reduced=6, roundings=8)


@both
def test_norm_gradient_of_gradient(rng, put, op):
    x, gamma = cases.random(rng, (8, 16)), cases.random(rng, (16,))

    def penalty(norm):
        def loss(x, gamma):
            return jnp.sum(jnp.sin(norm(x, gamma)))

        def squared(x, gamma):
            return sum(jnp.sum(jnp.square(g)) for g in jax.grad(loss, (0, 1))(x, gamma))

        return jax.grad(squared, (0, 1))

    got = jax.jit(penalty(lambda x, g: _apply(op, x, g)))(put(x, "dp"), put(gamma))
    want = _bare(penalty(lambda x, g: _plain(op, x, g)), x, gamma)
    for one, other in zip(got, want, strict=True):
        assert_shards_close(one, np.asarray(other), reduced=8 * 16, roundings=16)


@both
@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit], ids=["remat", "jit"])
def test_norm_wrapped_and_eager_agree(rng, put, op, wrap):
    x, gamma = put(cases.random(rng, (8, 16)), "dp"), put(cases.random(rng, (16,)))

    def loss(x, gamma):
        y, h = _apply(op, x, gamma, add=x, return_input=True)
        return jnp.sum(jnp.sin(y) * h)

    eager = jax.value_and_grad(loss, (0, 1))(x, gamma)
    wrapped = jax.jit(jax.value_and_grad(wrap(loss), (0, 1)))(x, gamma)
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(wrapped), strict=True):
        assert_close(one, np.asarray(other), reduced=8 * 16, roundings=4)
