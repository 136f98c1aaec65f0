"""softmax under JAX's transformations, without a mesh and on Auto and Explicit ones."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.primitives.softmax import softmax
from tests import cases, meshes
from tests.closeness import assert_close, assert_shards_close
from tests.primitives import test_softmax_reference as oracle

# of x and mask; None: the same for all
IN_AXES = [((0, None), 0), ((2, None), 1), ((None, 0), 0), ((0, 0), 2), ((1, 2), -1)]
SHAPE = (3, 5, 8)

every_axis = pytest.mark.parametrize("in_axes, out_axes", IN_AXES)
every_causal = pytest.mark.parametrize("causal", oracle.CAUSAL)


def _batched(rng, in_axes):
    x, mask = cases.random(rng, (4, *SHAPE)), rng.random((4, 1, 5, 8)) < 0.3
    given = [
        a[0] if axis is None else np.moveaxis(a, 0, axis)
        for a, axis in zip((x, mask), in_axes, strict=True)
    ]
    each = [
        [a[0 if axis is None else n] for a, axis in zip((x, mask), in_axes, strict=True)]
        for n in range(4)
    ]
    return given, each


@every_axis
@every_causal
def test_softmax_vmap(rng, put, in_axes, out_axes, causal):
    given, each = _batched(rng, in_axes)
    f = jax.vmap(lambda x, m: softmax(x, mask=m, causal=causal), in_axes, out_axes)
    want = np.stack([oracle.softmax_reference(x, m, causal=causal) for x, m in each], out_axes)
    assert_close(jax.jit(f)(*map(put, given)), want, reduced=8)


@every_axis
def test_softmax_vmap_of_gradient(rng, put, in_axes, out_axes):
    given, each = _batched(rng, in_axes)
    dy, options = cases.random(rng, SHAPE), {"scale": 0.5, "causal": "bottom_right"}

    def gradient(x, mask, dy):
        return jax.grad(lambda x: jnp.sum(softmax(x, mask=mask, **options) * dy))(x)

    got = jax.jit(jax.vmap(gradient, (*in_axes, None), out_axes))(*map(put, (*given, dy)))
    want = [oracle.softmax_vjp_reference(dy, x, m, **options) for x, m in each]
    assert_close(got, np.stack(want, out_axes), reduced=8, roundings=3)


def test_softmax_vmap_of_keys_alone(rng, put):
    """[k] under vmap is [b, k]: the new dim is no query dim that `causal` would see."""
    x, masks = cases.random(rng, (4, 8)), rng.random((3, 8)) < 0.3
    pairs = jax.vmap(jax.vmap(lambda x, m: softmax(x, mask=m), (None, 0)), (0, None))
    want = np.stack([[oracle.softmax_reference(a, m) for m in masks] for a in x])
    assert_close(jax.jit(pairs)(put(x), put(masks)), want, reduced=8)


@pytest.mark.parametrize(
    "spec", [("dp",), (None, "tp"), ("dp", None, "tp"), (None, None, None, "tp")]
)
def test_softmax_vmap_of_a_sharded_dim(rng, put, spec):
    """Batch, heads, queries (causal keeps their place) and keys are sharded, the batch mapped."""
    x, mask = cases.random(rng, (8, 4, 8, 8)), rng.random((8, 8)) < 0.3
    f = jax.vmap(lambda x, m: softmax(x, mask=m, causal="upper_left"), (0, None))
    got = jax.jit(f)(put(x, *spec), put(mask))
    assert_shards_close(got, oracle.softmax_reference(x, mask, causal="upper_left"), reduced=8)


def test_softmax_vmap_with_a_named_axis(rng, auto_mesh):
    x = cases.random(rng, (8, 4, 8))
    f = jax.vmap(lambda x: softmax(x, causal="upper_left"), spmd_axis_name="dp")
    got = jax.jit(f)(meshes.place(auto_mesh, x, "dp", None))
    assert_shards_close(got, oracle.softmax_reference(x, causal="upper_left"), reduced=8)


# --- derivatives of derivatives -----------------------------------------------------------------

MASK = np.arange(6) == 2


def _plain(x):
    seen = ~(MASK | ~jnp.tril(jnp.ones((x.shape[-2], 6), bool)))
    return jax.nn.softmax(0.5 * x, where=seen)


def _ours(x):
    return softmax(x, scale=0.5, mask=MASK, causal="upper_left")


def _bare(f, *arrays):
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.jit(f)(*arrays)


def test_softmax_jacobian(rng, put):
    x = cases.random(rng, (4, 6))
    got, want = jax.jit(jax.jacrev(_ours))(put(x)), _bare(jax.jacrev(_plain), x)
    assert_close(got, np.asarray(want), reduced=6, roundings=8)


def test_softmax_hessian(rng, put):
    x = cases.random(rng, (4, 6))

    def hessian(f):
        return jax.jacrev(jax.jacrev(lambda x: jnp.sum(jnp.sin(3 * f(x)))))

    got, want = jax.jit(hessian(_ours))(put(x)), _bare(hessian(_plain), x)
    assert_close(got, np.asarray(want), reduced=24, roundings=8)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("spec", [("dp",), (None, "tp"), ("dp", "tp"), (None, None, "dp")], ids=str)
def test_softmax_derivatives_of_higher_order(rng, put, order, spec):
    x = cases.random(rng, (4, 8, 6))

    def derivative(f, order):
        def loss(x):
            return jnp.sum(jnp.sin(3 * f(x)))

        for _ in range(order):
            loss = (lambda inner: lambda x: jnp.sum(jnp.square(jax.grad(inner)(x))))(loss)
        return jax.grad(loss)

    got = jax.jit(derivative(_ours, order - 1))(put(x, *spec))
    want = _bare(derivative(_plain, order - 1), x)
    assert np.abs(np.asarray(want)).max() > 1e-3
    assert_shards_close(got, np.asarray(want), reduced=4 * 8 * 6, roundings=16)


# --- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit], ids=["remat", "jit"])
@every_causal
def test_softmax_wrapped_and_eager_agree(rng, put, wrap, causal):
    x, mask = put(cases.random(rng, (8, 4, 16)), "dp", "tp"), put(rng.random((4, 16)) < 0.3)

    def loss(x, mask):
        return jnp.sum(jnp.sin(3 * softmax(x, mask=mask, causal=causal)))

    eager = jax.value_and_grad(loss)(x, mask)
    wrapped = jax.jit(jax.value_and_grad(wrap(loss)))(x, mask)
    for one, other in zip(eager, wrapped, strict=True):
        assert_close(one, np.asarray(other), reduced=8 * 4 * 16, roundings=4)


def test_softmax_scan(rng, put):
    """Three layers, the mask a constant of the loop."""
    x, mask = cases.random(rng, (8, 8, 8)), np.arange(8) == 5

    def layers(x, softmax):
        def layer(x, scale):
            return 3 * softmax(x) * scale, None

        return jax.lax.scan(layer, x, jnp.arange(1.0, 4.0))[0]

    def loss(softmax):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(layers(x, softmax))))

    def ours(x):
        return softmax(x, mask=mask, causal="upper_left")

    def plain(x):
        return jax.nn.softmax(x, where=jnp.tril(jnp.ones((8, 8), bool)) & ~mask)

    got = jax.jit(loss(ours))(put(x, "dp", "tp"))
    want = _bare(loss(plain), x)
    for one, other in zip(got, want, strict=True):
        assert_shards_close(one, np.asarray(other), reduced=512, roundings=8)


def test_softmax_without_jit(rng):
    x = cases.random(rng, (4, 8))
    with jax.disable_jit():
        y, pull = jax.vjp(lambda x: softmax(x, causal="upper_left"), x)
        (dx,) = pull(jnp.asarray(x))
    assert_close(y, oracle.softmax_reference(x, causal="upper_left"), reduced=8)
    want = oracle.softmax_vjp_reference(x, x, causal="upper_left")
    assert_close(dx, want, reduced=8, roundings=3)


def test_softmax_is_exported_from_an_explicit_mesh(rng, explicit_mesh):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")
    x = meshes.place(explicit_mesh, cases.random(rng, (8, 8, 16)), "dp", "tp")
    jitted = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(softmax(x, causal="bottom_right")))))
    blob = jax.export.export(jitted)(x).serialize()
    got = jax.jit(jax.export.deserialize(blob).call)(x)
    assert_shards_close(got, np.asarray(jitted(x)), reduced=16)


def _kernels() -> dict[str, bool]:
    """{primitive: its `kernel` flag} in the traced program."""
    f = jax.grad(lambda x: jnp.sum(jnp.sin(softmax(x))))
    text = re.sub(r"\s+", " ", str(jax.make_jaxpr(f)(jnp.ones((4, 8)))))
    flags = re.findall(r"(shardops_softmax_\w+)\[.*?kernel=(True|False)", text)
    return {name: flag == "True" for name, flag in flags}


@pytest.mark.parametrize(
    "pattern, forward, backward",
    [
        (".*", True, True),
        ("softmax", True, False),
        (r"softmax\.grad", False, True),
        ("", False, False),
    ],
)
def test_softmax_kernels_are_chosen_by_name(pattern, forward, backward):
    with so.use_kernels(pattern):
        assert _kernels() == {
            "shardops_softmax_forward": forward,
            "shardops_softmax_backward": backward,
        }
