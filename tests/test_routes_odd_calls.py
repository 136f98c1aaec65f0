"""Calls that reach the routes by unusual ways: no arguments, no jit, no elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes


def test_jit_without_arguments_on_an_auto_mesh(auto_mesh):
    """JAX then tells the partitioner of no mesh: the ambient one of the trace stands in."""

    @jax.jit
    def constants():
        product = so.gemm(jnp.ones((8, 16)), jnp.ones((16, 8)), out_sharding=P("dp"))
        normal = so.rms_norm(jnp.ones((8, 16)), jnp.ones(16))
        return product, jax.lax.with_sharding_constraint(normal, P("dp", "tp"))

    product, normal = constants()
    np.testing.assert_allclose(product, 16.0)
    np.testing.assert_allclose(normal, 1.0, rtol=1e-5)


def test_jit_without_arguments_and_without_a_mesh():
    assert float(jax.jit(lambda: so.gemm(jnp.ones((2, 3)), jnp.ones((3, 4))).sum())()) == 24


def test_disable_jit(put):
    x, w = put(jnp.ones((8, 16)), "dp", "tp"), put(jnp.ones((16, 8)), "tp")
    gamma = put(jnp.ones(16))
    with jax.disable_jit():
        product = so.gemm(x, w)
        gradient = jax.grad(lambda g: so.layer_norm(x, g).sum())(gamma)
    np.testing.assert_allclose(product, 16.0)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((0, 8, 16), ("dp",)), ((4, 0, 16), ("dp", "tp")), ((4, 8, 0), ("dp", None, "tp"))],
)
def test_gemm_of_no_elements(any_mesh, shape, layout):
    x = meshes.place(any_mesh, jnp.zeros(shape), *layout)
    w = meshes.place(any_mesh, jnp.ones((shape[-1], 4)))
    bias = meshes.place(any_mesh, jnp.ones(4))

    @jax.jit
    def step(x, w, bias):
        out, pull = jax.vjp(lambda x, w, b: so.gemm(x, w, bias=b), x, w, bias)
        return out, *pull(out)

    out, dx, dw, dbias = step(x, w, bias)
    np.testing.assert_array_equal(out, np.ones((*shape[:2], 4)))
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dw, np.zeros(w.shape))
    np.testing.assert_allclose(dbias, shape[0] * shape[1])


@pytest.mark.parametrize(("shape", "layout"), [((0, 16), ("dp",)), ((4, 0, 16), ("dp", "tp"))])
def test_norm_of_no_rows(any_mesh, shape, layout):
    x = meshes.place(any_mesh, jnp.zeros(shape), *layout)
    gamma = meshes.place(any_mesh, jnp.ones(16))

    @jax.jit
    def step(x, gamma):
        y, pull = jax.vjp(so.rms_norm, x, gamma)
        return y, *pull(y)

    y, dx, dgamma = step(x, gamma)
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(dgamma, np.zeros(16))


def test_host_arrays_and_a_constraint_on_an_auto_mesh(rng, auto_mesh):
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((8, 16), (16, 8)))

    @jax.jit
    def f(x, w):
        return so.gemm(jax.lax.with_sharding_constraint(x, P("dp")), w)

    np.testing.assert_allclose(f(x, w), x @ w, atol=1e-4)


def test_axis_cut_by_a_reshape_and_moved_by_a_transpose(rng, auto_mesh):
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((8, 16), (16, 8)))
    placed = meshes.place(auto_mesh, x, ("dp", "tp"))

    def cut(x):
        return x.reshape(2, 2, 2, 16).transpose(1, 0, 2, 3)

    got = jax.jit(lambda x, w: so.gemm(cut(x), w))(placed, w)
    np.testing.assert_allclose(got, cut(x) @ w, atol=1e-4)


def test_unconstrained_dims_are_left_to_the_partitioner(auto_mesh):
    x = meshes.place(auto_mesh, jnp.ones((8, 16)), "dp")
    w = jnp.ones((16, 8))
    f = jax.jit(lambda x, w: so.gemm(x, w, out_sharding=P(P.UNCONSTRAINED, "tp")))
    assert f(x, w).sharding.spec == P("dp", "tp")


def test_gradient_of_add_has_the_layout_of_add(rng, explicit_mesh):
    x, residual = (rng.standard_normal((8, 16)).astype(np.float32) for _ in range(2))
    gamma = jnp.ones(16)
    placed = meshes.place(explicit_mesh, x, "dp"), meshes.place(explicit_mesh, residual, "dp", "tp")
    gradient = jax.grad(lambda x, r: jnp.sin(so.rms_norm(x, gamma, add=r)).sum(), (0, 1))
    dx, dresidual = jax.jit(gradient)(*placed)
    assert jax.typeof(dresidual).sharding.spec == P("dp", "tp")
    np.testing.assert_allclose(np.asarray(dx), np.asarray(dresidual), atol=1e-6)


def test_nested_manual_axes_that_xla_cannot_sort_are_refused():
    explicit, auto = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(explicit, explicit, auto))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((2, 8, 16), np.float32), P("b", "a"))
        norm = jax.shard_map(
            lambda x: so.rms_norm(x, jnp.ones(16)),
            in_specs=P("b"),
            out_specs=P("b"),
            axis_names={"b"},
        )
        with pytest.raises(NotImplementedError, match="Put 'b' first in the mesh"):
            jax.jit(norm)(x)


def plain_layer_norm(x, gamma):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * gamma


def test_gamma_laid_out_apart_under_vmap_and_second_derivatives(rng, explicit_mesh):
    """What runs as the reference sees its operands laid out alike."""
    x = rng.standard_normal((4, 8, 16)).astype(np.float32)
    gamma, gammas = (rng.standard_normal(s).astype(np.float32) for s in (16, (4, 16)))
    xs = meshes.place(explicit_mesh, x, None, "dp", "tp")
    placed = meshes.place(explicit_mesh, gamma, "dp")
    all_placed = meshes.place(explicit_mesh, gammas, None, "dp")

    def losses(norm):
        def loss(x, gamma):
            return jnp.sin(norm(x, gamma)).sum()

        def second(x, gamma):
            return jax.grad(lambda x: jnp.cos(jax.grad(loss, 1)(x, gamma)).sum())(x)

        return jax.vmap(jax.grad(loss, (0, 1)), (0, None)), jax.vmap(loss), second

    ours, plain = losses(so.layer_norm), losses(plain_layer_norm)
    for f, g, mine, theirs in zip(
        ours, plain, (placed, all_placed, placed), (gamma, gammas, gamma), strict=True
    ):
        got, want = f(xs, mine), g(x, theirs)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=2e-5)


@pytest.mark.parametrize("op", [so.gemm, so.dense])
def test_eager_calls_and_gradients_on_axes_of_both_kinds(op):
    """A constraint on the Auto axes, outside of a jit, would take the Explicit ones away."""
    kinds = (AxisType.Auto, AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=kinds)
    with jax.set_mesh(mesh):
        x = meshes.place(mesh, jnp.ones((8, 8)), "b", "a")
        w = meshes.place(mesh, jnp.ones((8, 32)), "c", "b")
        y, pull = jax.vjp(lambda x, w: op(x, w, out_sharding=P("c", "a")), x, w)
        assert jax.typeof(y).sharding.spec == P("c", None)
        assert y.sharding.spec == P("c", "a")
        gradients = pull(y)
    assert [jax.typeof(g) for g in gradients] == [jax.typeof(a) for a in (x, w)]
    np.testing.assert_array_equal(y, 8.0)
    np.testing.assert_array_equal(gradients[0], 8.0 * 32)
    np.testing.assert_array_equal(gradients[1], 8.0 * 8)
