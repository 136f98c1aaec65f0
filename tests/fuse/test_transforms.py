"""`fuse` under JAX's transformations, and around them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardops as so
from tests.fuse.programs import (
    DIM,
    TWO_BLOCKS,
    assert_same,
    block,
    draw,
    kinds,
    loss_of,
    ops_in,
    two_blocks,
    values_and_gradients,
)

pytestmark = pytest.mark.usefixtures("one_device")

ONE_BLOCK = {"return_input": 1, "bias+activation": 1}


def stacked(p):
    return jax.tree.map(lambda a: jnp.stack([a, 2 * a, -a]), p)


def scanned(p, x):
    return jax.lax.scan(lambda x, p: (block(p, x), x.sum()), x, p)


def remat_scanned(p, x):
    return jax.lax.scan(lambda x, p: (jax.checkpoint(block)(p, x), None), x, p)[0]


def looped(p, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: block(p, x), x)


def while_looped(p, x):
    done = lambda state: so.rms_norm(state[1], p["gamma"]).sum() < 1e6  # noqa: E731
    return jax.lax.while_loop(
        lambda s: (s[0] < 3) & done(s), lambda s: (s[0] + 1, block(p, s[1])), (0, x)
    )


def branched(p, x):
    return jax.lax.cond(x.sum() > 0, block, lambda p, x: x - block(p, x), p, x)


def jitted(p, x):
    return jax.jit(block)(p, jax.jit(block)(p, x))


@pytest.mark.parametrize("fn", [scanned, remat_scanned], ids=["plain", "checkpoint"])
def test_scan_bodies(p, x, fn) -> None:
    assert kinds(assert_same(fn, stacked(p), x)) == ONE_BLOCK


def test_branches(p, x) -> None:
    report = assert_same(branched, p, x)
    assert kinds(report) == {"return_input": 2, "bias+activation": 2}


@pytest.mark.parametrize("fn", [looped, while_looped])
def test_loops(p, x, fn) -> None:
    fused = so.fuse(fn)
    for got, want in zip(jax.tree.leaves(fused(p, x)), jax.tree.leaves(fn(p, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert kinds(fused.report) == ONE_BLOCK


def test_jits_inside_and_outside(p, x) -> None:
    assert kinds(assert_same(jitted, p, x)) == ONE_BLOCK  # one program, called twice
    assert kinds(assert_same(jax.jit(two_blocks), p, x, wrap=lambda f: f)) == TWO_BLOCKS


def test_a_jit_inside_is_compiled_once(p, x) -> None:
    """The second eager call finds the program of the first, as that of the jit itself would."""
    compiled = []

    @jax.jit
    def counted(p, x):
        jax.debug.callback(lambda: None)
        return two_blocks(p, x)

    def listen(name, *_, **__):
        compiled.append(name) if name.endswith("backend_compile_duration") else None

    fused = so.fuse(counted)
    fused(p, x)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fused(p, x)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


@pytest.mark.parametrize("order", ["vmap of fuse", "fuse of vmap"])
def test_vmap(p, rng, order) -> None:
    """A function that is fused may be mapped; ops that are mapped inside of it are left alone."""
    xs = draw(rng, 3, 4, DIM)
    fused = so.fuse(two_blocks)
    mapped = jax.vmap(fused, (None, 0)) if order == "vmap of fuse" else None
    mapped = mapped or so.fuse(jax.vmap(two_blocks, (None, 0)))
    want = jax.jit(values_and_gradients(jax.vmap(two_blocks, (None, 0))))(p, xs)
    got = jax.jit(values_and_gradients(mapped))(p, xs)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)
    report = (fused if order == "vmap of fuse" else mapped).report
    assert kinds(report) == (TWO_BLOCKS if order == "vmap of fuse" else {})
    assert all("vmap" in m.why for m in report.missed)


def test_norms_in_a_gradient_inside_are_left_alone(p, x) -> None:
    """They are forward and backward by then. What is fused before the gradient is taken, is."""

    def step(p, x):
        return jax.value_and_grad(loss_of(block))(p, x)

    fused = so.fuse(step)
    got, want = jax.jit(fused)(p, x), jax.jit(step)(p, x)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
    counts = [ops_in(jax.make_jaxpr(f)(p, x)) for f in (step, fused)]
    assert counts[0]["backward"] == counts[1]["backward"] == 1
    assert {*kinds(fused.report)} <= {"bias"}  # of the forward product, whose value it is
    assert "rms_norm" in {m.op for m in fused.report.missed}
    inside = jax.make_jaxpr(lambda p, x: jax.grad(loss_of(so.fuse(block)))(p, x))(p, x)
    assert ops_in(inside)["backward, residual"] == 1


@pytest.mark.parametrize("policy", [None, "everything_saveable", "names"])
def test_checkpoint_keeps_policy_and_names(p, x, policy) -> None:
    """What is computed again is what is computed again without `fuse`."""
    policies = jax.checkpoint_policies
    given = policies.save_only_these_names("up") if policy == "names" else policy
    given = getattr(policies, policy) if policy == "everything_saveable" else given

    @functools.partial(jax.checkpoint, policy=given)
    def named(p, x):
        y = checkpoint_name(so.rms_norm(x, p["gamma"]), "up")
        return x + jnp.sin(so.gemm(y, p["up"])) @ p["down"]

    assert kinds(assert_same(named, p, x)) == {"return_input": 1}
    counts = [ops_in(jax.make_jaxpr(jax.grad(loss_of(f)))(p, x)) for f in (named, so.fuse(named))]
    assert counts[0]["norm"] == counts[1]["norm"]
    assert counts[1]["backward, residual"] == 1


def test_functions_with_derivatives_of_their_own_are_left_alone(p, x) -> None:
    @jax.custom_vjp
    def scaled(p, x):
        return block(p, x)

    scaled.defvjp(
        lambda p, x: (scaled(p, x), (p, x)),
        lambda saved, dy: (saved[0], 3 * dy * jnp.ones_like(dy)),
    )
    report = assert_same(lambda p, x: scaled(p, x) * 2, p, x)
    assert report.fused == ()
    assert {m.why for m in report.missed} == {"`custom_vjp_call` around it is left as it is"}


def test_a_function_without_matches_is_the_same_program(rng) -> None:
    def other(x, w):
        y = jax.jit(jnp.tanh)(x) @ w
        z = jax.lax.scan(lambda c, a: (c + a, c * a), y[0], y)
        return jax.nn.relu(z[1]), jnp.float32(3) * x, jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, w)

    args = draw(rng, 4, DIM), draw(rng, DIM, DIM)
    fused = so.fuse(other)
    assert str(jax.make_jaxpr(fused)(*args)) == str(jax.make_jaxpr(other)(*args))
    for got, want in zip(fused(*args), other(*args), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
