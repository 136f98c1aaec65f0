"""gemm under JAX's transformations, without a mesh and on Auto and Explicit ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import cases, references
from tests.closeness import assert_close, assert_shards_close

GELU = {"activation": "gelu"}


def _rows(array, axis, count):
    """What vmap sees of an argument, an example at a time."""
    if axis is None:
        return itertools.repeat(array, count)
    return np.moveaxis(array, axis, 0)


def _batched(rng, shape, axis, count=4):
    if axis is None:
        return cases.random(rng, shape)
    at = axis % (len(shape) + 1)
    return cases.random(rng, (*shape[:at], count, *shape[at:]))


IN_AXES = [
    ((0, None, None), 0),
    ((None, 0, None), 0),
    ((None, None, 0), 0),
    ((0, 0, None), 0),
    ((0, None, 0), 0),
    ((None, 0, 0), 1),
    ((0, 0, 0), 2),
    ((1, 2, 1), -1),
    ((-1, 1, None), 1),
]


@pytest.mark.parametrize("in_axes, out_axes", IN_AXES)
def test_gemm_vmap(rng, put, in_axes, out_axes):
    shapes = (8, 16), (16, 24), (24,)
    x, w, bias = (_batched(rng, s, a) for s, a in zip(shapes, in_axes, strict=True))

    def f(x, w, bias):
        return so.gemm(x, w, bias=bias, activation="gelu")

    got = jax.jit(jax.vmap(f, in_axes, out_axes))(put(x), put(w), put(bias))
    each = zip(*(_rows(a, i, 4) for a, i in zip((x, w, bias), in_axes, strict=True)), strict=False)
    want = [references.gemm_reference(x, w, bias=b, activation="gelu") for x, w, b in each]
    assert_close(got, np.stack(want, out_axes), reduced=16, roundings=3)


@pytest.mark.parametrize("in_axes, out_axes", IN_AXES)
def test_gemm_vmap_of_gradient(rng, put, in_axes, out_axes):
    """Per-example gradients, whichever operand has examples."""
    shapes = (8, 16), (16, 24), (24,)
    arrays = [_batched(rng, s, a) for s, a in zip(shapes, in_axes, strict=True)]
    c = cases.random(rng, (8, 24))

    def gradients(x, w, bias, c):
        def loss(x, w, bias):
            return jnp.sum(so.gemm(x, w, bias=bias, activation="gelu") * c)

        return jax.grad(loss, (0, 1, 2))(x, w, bias)

    got = jax.jit(jax.vmap(gradients, (*in_axes, None)))(*map(put, arrays), put(c))
    each = zip(*(_rows(a, i, 4) for a, i in zip(arrays, in_axes, strict=True)), strict=False)
    want = [references.gemm_vjp_reference(c, x, w, bias=b, activation="gelu") for x, w, b in each]
    for one, name in zip(got, ("lhs", "rhs", "bias"), strict=True):
        stacked = np.stack([getattr(v, name) for v in want])
        assert_close(one, stacked, reduced=40, roundings=5, what=name)


def test_gemm_vmap_of_add_and_of_a_sharded_dim(rng, put):
    """The mapped dim itself is sharded, and add has it too."""
    x, add = cases.random(rng, (8, 4, 16)), cases.random(rng, (8, 4, 24))
    w = cases.random(rng, (16, 24))

    def f(x, add, w):
        return so.gemm(x, w, add=add)

    mapped = jax.vmap(f, (0, 0, None))
    got = jax.jit(mapped)(put(x, "dp"), put(add, "dp"), put(w, None, "tp"))
    want = x.astype(np.float64) @ w + add
    assert_shards_close(got, want, reduced=16)
    got = jax.jit(jax.vmap(f, (None, 0, None)))(put(x[0]), put(add), put(w))
    assert_shards_close(got, x[0].astype(np.float64) @ w + add, reduced=16)


def test_gemm_vmap_nested(rng, put):
    """All pairs: over x outside, over w inside."""
    x, w = cases.random(rng, (4, 8, 16)), cases.random(rng, (2, 16, 24))
    pairs = jax.vmap(jax.vmap(so.gemm, (None, 0)), (0, None))
    got = jax.jit(pairs)(put(x), put(w))
    assert_close(got, np.einsum("bsk,gkn->bgsn", x.astype(np.float64), w), reduced=16)
    both = jax.vmap(jax.vmap(so.gemm))
    got = jax.jit(both)(put(np.stack([x, x])), put(np.stack([[w[0]] * 4, [w[1]] * 4])))
    assert_close(got, np.einsum("bsk,gkn->gbsn", x.astype(np.float64), w), reduced=16)


def test_dot_general_vmap(rng, put):
    numbers = (((2,), (2,)), ((0,), (0,)))
    q, k = cases.random(rng, (4, 2, 8, 16)), cases.random(rng, (2, 4, 8, 16))
    got = jax.jit(jax.vmap(lambda q, k: so.dot_general(q, k, numbers), (0, 1)))(put(q), put(k))
    assert_close(got, np.einsum("vbqd,bvkd->vbqk", q.astype(np.float64), k), reduced=16)


def test_gemm_jacobian(rng, put):
    """d y[i, j] / d w[k, l] = x[i, k] if j == l."""
    x, w = cases.random(rng, (2, 4)), cases.random(rng, (4, 3))
    got = jax.jit(jax.jacrev(so.gemm, (0, 1)))(put(x), put(w))
    identity = np.eye(3), np.eye(2)
    assert_close(got[1], np.einsum("ik,jl->ijkl", x, identity[0]), reduced=1)
    assert_close(got[0], np.einsum("kj,im->ijmk", w, identity[1]), reduced=1)


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_gemm_gradient_of_gradient(rng, put, activation):
    x, w, bias = cases.random(rng, (8, 16)), cases.random(rng, (16, 8), scale=0.25), np.ones(8)
    bias = bias.astype(np.float32)

    def penalty(gemm):
        def loss(w, x, bias):
            return jnp.sum(jnp.square(gemm(x, w, bias)))

        return jax.jit(jax.grad(lambda w, x, b: jnp.sum(jnp.square(jax.grad(loss)(w, x, b)))))

    act = {None: lambda z: z, "gelu": jax.nn.gelu, "silu": jax.nn.silu}[activation]
    got = penalty(lambda x, w, b: so.gemm(x, w, bias=b, activation=activation))(
        put(w), put(x, "dp"), put(bias)
    )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        want = penalty(lambda x, w, b: act(x @ w + b))(w, x, bias)
    # two chains of products, each with terms of 8 rows and 16 columns
    assert_close(got, np.asarray(want), reduced=8 * 16 * 16, roundings=8)


def network(x, weights, wrap):
    """Three layers, a norm and a product each."""

    def layer(h, w):
        y, h = so.rms_norm(h, jnp.ones(h.shape[-1], h.dtype), add=h, return_input=True)
        return h + 0.1 * so.gemm(y, w, activation="gelu"), None

    return jnp.sum(jnp.square(jax.lax.scan(wrap(layer), x, weights)[0]))


def network_reference(x, weights):
    h = x
    for w in weights:
        h = 2 * h
        y = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        h = h + 0.1 * jax.nn.gelu(y @ w)
    return jnp.sum(jnp.square(h))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["", "remat", "jit"])
def test_scan_over_layers(rng, put, wrap):
    x = cases.random(rng, (8, 16, 32))
    weights = cases.random(rng, (3, 32, 32), scale=0.2)
    step = jax.jit(jax.value_and_grad(lambda x, w: network(x, w, wrap), (0, 1)))
    got, gradients = step(put(x, "dp"), put(weights))
    want, wanted = _on_one_device(network_reference, x, weights)
    np.testing.assert_allclose(float(got), float(want), rtol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        assert_shards_close(one, np.asarray(other), reduced=128 * 32, roundings=8)


def _on_one_device(f, *arrays):
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.jit(jax.value_and_grad(f, tuple(range(len(arrays)))))(*arrays)


def test_gemm_eager_and_nested_jit_agree(rng, put):
    x, w = put(cases.random(rng, (8, 16)), "dp"), put(cases.random(rng, (16, 24)), None, "tp")

    def loss(x, w):
        return jnp.sum(jnp.square(so.gemm(x, w, **GELU)))

    eager = jax.value_and_grad(loss, (0, 1))(x, w)
    inner = jax.jit(loss)
    nested = jax.jit(lambda x, w: jax.value_and_grad(lambda *a: jax.jit(inner)(*a), (0, 1))(x, w))
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(nested(x, w)), strict=True):
        assert_close(one, np.asarray(other), reduced=16 * 24, roundings=4)


def test_gemm_in_cond_and_while(rng, put):
    x, w = put(cases.random(rng, (8, 16)), "dp"), put(np.eye(16, dtype=np.float32) * 0.5)

    def f(x, w, flag):
        x = jax.lax.cond(flag, lambda x: so.gemm(x, w), lambda x: x, x)
        return jax.lax.fori_loop(0, 3, lambda _, x: so.gemm(x, w), x)

    jitted = jax.jit(f)
    np.testing.assert_allclose(np.asarray(jitted(x, w, True)), np.asarray(x) / 16, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(jitted(x, w, False)), np.asarray(x) / 8, rtol=1e-6)


def test_gemm_donated_input(rng, put):
    """A donated operand that is also the residual: the result is right, whatever is reused."""
    x, w = cases.random(rng, (16, 16)), cases.random(rng, (16, 16))
    want = x.astype(np.float64) @ w + x
    step = jax.jit(lambda x, w: so.gemm(x, w, add=x), donate_argnums=0)
    assert_shards_close(step(put(x.copy(), "dp"), put(w)), want, reduced=16)
