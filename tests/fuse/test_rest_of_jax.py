"""`fuse` of functions that use the rest of JAX: effects, refs, statics, exports."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests.fuse.programs import (
    TWO_BLOCKS,
    block,
    kinds,
    loss_of,
    ops_in,
    two_blocks,
)

pytestmark = pytest.mark.usefixtures("one_device")

ONE_BLOCK = {"return_input": 1, "bias+activation": 1}


def test_effects_keep_their_order(p, x, capfd) -> None:
    def printing(p, x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        s = x + 1
        jax.debug.print("second {}", s[0, 0], ordered=True)
        y = so.rms_norm(s, p["gamma"])
        jax.debug.print("third {}", y.shape, ordered=True)
        return y + s

    fused = so.fuse(printing)
    jax.jit(fused)(p, x).block_until_ready()
    jax.effects_barrier()
    words = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert words == ["first", "second", "third"]
    assert fused.report.missed


def test_refs_are_read_and_written_in_order(p, x) -> None:
    def counting(p, x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        s = ref[...]
        y = so.rms_norm(s, p["gamma"])
        ref[...] = s + y
        return ref[...] - s

    fused = so.fuse(counting)
    np.testing.assert_allclose(jax.jit(fused)(p, x), jax.jit(counting)(p, x), rtol=1e-6)


def test_donation_of_a_jit_inside(p, x) -> None:
    step = jax.jit(two_blocks, donate_argnums=1)
    want = two_blocks(p, x)
    given = x + 0
    np.testing.assert_allclose(so.fuse(step)(p, given), want, rtol=1e-5, atol=1e-5)
    assert given.is_deleted()


def test_pytrees_statics_and_keywords(p, x) -> None:
    """Arguments and results that are no arrays are the function's own."""

    def model(state, *, depth, mode="train", scale=None):
        x = state["x"]
        for _ in range(depth):
            x = block(state["p"], x)
        return {"x": x, "mode": mode, "depth": depth, "none": None}, (depth + 1, scale)

    fused = so.fuse(model)
    got = fused({"p": p, "x": x}, depth=2, scale=0.5)
    assert got[0]["mode"] == "train"
    assert got[0]["none"] is None
    assert (got[0]["depth"], got[1]) == (2, (3, 0.5))
    assert type(got[1][0]) is int
    np.testing.assert_allclose(got[0]["x"], two_blocks(p, x), rtol=1e-5, atol=1e-5)
    assert kinds(fused.report) == TWO_BLOCKS
    jit = jax.jit(lambda s, d: fused(s, depth=d)[0]["x"], static_argnums=1)
    np.testing.assert_allclose(jit({"p": p, "x": x}, 2), two_blocks(p, x), rtol=1e-5, atol=1e-5)


def test_static_arguments_of_a_jit_around(p, x) -> None:
    def repeated(p, x, times):
        for _ in range(times):
            x = block(p, x)
        return x

    outer = jax.jit(so.fuse(repeated), static_argnames="times")
    np.testing.assert_allclose(outer(p, x, times=2), two_blocks(p, x), rtol=1e-5, atol=1e-5)


def test_closed_over_tracers(p, x) -> None:
    """Parameters that an outer gradient and an outer scan hold."""

    def outer(p, x):
        inner = so.fuse(lambda x: block(p, x))
        return jax.lax.scan(lambda x, _: (inner(x), None), x, None, length=2)[0]

    want = jax.jit(jax.grad(loss_of(two_blocks)))(p, x)
    # The check collects garbage after each trace. A tracer that leaks is a new object: all that
    # the tests before have left need not be looked through.
    gc.freeze()
    try:
        with jax.checking_leaks():
            got = jax.jit(jax.grad(loss_of(outer)))(p, x)
    finally:
        gc.unfreeze()
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5)
    counts = ops_in(jax.make_jaxpr(jax.grad(loss_of(outer)))(p, x))
    assert counts["backward, residual"] == 1


def test_weak_types_are_kept(p, x) -> None:
    def weak(p, x):
        total = jnp.asarray(1.0) * 2
        return (
            x + so.rms_norm(x, p["gamma"]),
            total,
            jax.lax.fori_loop(0, 2, lambda i, c: c * 2, 1.0),
        )

    fused = so.fuse(weak)
    got, want = jax.eval_shape(fused, p, x), jax.eval_shape(weak, p, x)
    assert [a.weak_type for a in got] == [a.weak_type for a in want]
    assert [jax.typeof(a) for a in fused(p, x)] == [jax.typeof(a) for a in weak(p, x)]


def test_methods_and_decorators(p, x) -> None:
    class Model:
        def __init__(self, p):
            self.p = p

        @so.fuse
        def __call__(self, x):
            """One block."""
            return block(self.p, x)

    model = Model(p)
    np.testing.assert_allclose(model(x), block(p, x), rtol=1e-5, atol=1e-5)
    assert Model.__call__.__doc__ == "One block."
    assert kinds(Model.__call__.report) == ONE_BLOCK


def test_reports_of_methods(p, x) -> None:
    class Model:
        @so.fuse
        def apply(self, x):
            """One block."""
            return block(p, x)

    model = Model()
    assert kinds(model.apply.explain(x)) == ONE_BLOCK
    assert model.apply.report == Model.apply.report
    assert (model.apply.__name__, model.apply.__doc__) == ("apply", "One block.")
    assert model.apply == model.apply
    assert model.apply != Model().apply
    traced = jax.jit(model.apply)(x)
    np.testing.assert_allclose(traced, block(p, x), rtol=1e-5, atol=1e-5)


def test_functions_with_their_own_derivative_are_named(p, x) -> None:
    @jax.custom_vjp
    def own(x):
        return x + so.rms_norm(x, p["gamma"])

    own.defvjp(lambda x: (own(x), None), lambda _, dy: (dy,))
    for fn in (own, lambda x: own(x)):  # the first one has no line of its own call
        report = so.fuse(fn).explain(x)
        (miss,) = report.missed
        assert miss.op == "rms_norm"
        assert miss.where.startswith("test_rest_of_jax.py:")
        assert miss.why == "`custom_vjp_call` around it is left as it is"
        assert "?" not in str(report)


def test_gradients_of_gradients(p, x) -> None:
    def twice(fn):
        inner = jax.grad(lambda x: loss_of(fn)(p, x))
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(inner(x)))))

    np.testing.assert_allclose(twice(so.fuse(block))(x), twice(block)(x), rtol=1e-3, atol=1e-4)


def test_export(p, x) -> None:
    exported = jax.export.export(jax.jit(so.fuse(two_blocks)))(p, x)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(p, x), two_blocks(p, x), rtol=1e-5, atol=1e-5)
