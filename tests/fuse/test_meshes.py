"""`fuse` on meshes: values, gradients, no collective more; and a model unfused by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import shardops as so
from shardops import hlo
from tests import meshes
from tests.fuse import hand_fused as model
from tests.fuse.programs import (
    DIM,
    HIDDEN,
    TWO_BLOCKS,
    assert_same,
    draw,
    kinds,
    ops_in,
    parameters,
    two_blocks,
    values_and_gradients,
)

SPECS = {"gamma": (None,), "up": (None, "tp"), "up_bias": ("tp",), "down": ("tp", None)}


STREAM, HIDDEN_UNITS = P("dp", "tp", None), P("dp", None, "tp")


def block(p, x):
    """Tensor and sequence parallel, with what is asked of the products' results in between."""
    z = so.gemm(so.rms_norm(x, p["gamma"]), p["up"], out_sharding=HIDDEN_UNITS) + p["up_bias"]
    return x + so.gemm(jax.nn.gelu(z), p["down"], out_sharding=STREAM)


def sharded_blocks(p, x):
    return block(p, block(p, x))


def scanned(p, x):
    layers = jax.tree.map(lambda a: jnp.stack([a, -a]), p)
    return jax.lax.scan(lambda x, p: (jax.checkpoint(block)(p, x), None), x, layers)[0]


def placed(mesh, rng):
    p = {k: meshes.place(mesh, a, *SPECS[k]) for k, a in parameters(rng).items()}
    return p, meshes.place(mesh, draw(rng, 4, 8, DIM), "dp", "tp", None)


def assert_same_and_no_more_moves(fn, *args):
    """As `assert_same`, of programs whose collectives are counted too."""
    programs = []

    def compiled(f):
        programs.append(jax.jit(f).lower(*args).compile())
        return programs[-1]

    report = assert_same(fn, *args, wrap=compiled)
    before, after = map(hlo.summary, programs)
    assert {*after} <= {*before}
    for kind, (count, size) in after.items():
        assert count <= before[kind][0], (kind, before, after)
        assert size <= before[kind][1], (kind, before, after)
    return report


def test_blocks_on_meshes(mesh, rng) -> None:
    p, x = placed(mesh, rng)
    report = assert_same_and_no_more_moves(sharded_blocks, p, x)
    assert kinds(report) == TWO_BLOCKS
    assert report.missed == ()


def test_blocks_on_auto_axes_with_nothing_asked(auto_mesh, rng) -> None:
    """Where the partitioner itself moves results, collectives are its choice: not counted."""
    p, x = placed(auto_mesh, rng)
    assert kinds(assert_same(two_blocks, p, x)) == TWO_BLOCKS


# Results that are moved after the product: wanted, operands' specs, the bias's.
MOVED = {
    "gathered": (P(None, None), ("dp", None), (None, None), None),
    "gathered, with a bias": (P(None, None), ("dp", None), (None, None), (None,)),
    "exchanged": (P(None, "tp"), ("tp", None), (None, None), None),
    "exchanged, the bias lies as the result": (
        P(None, "tp"),
        ("tp", None),
        (None, None),
        ("tp",),
    ),
    "summed and gathered": (P(None, None), ("dp", "tp"), ("tp", None), (None,)),
}


@pytest.mark.parametrize(("wanted", "lhs", "rhs", "bias"), MOVED.values(), ids=MOVED)
def test_results_that_move_on_take_an_epilogue(mesh, rng, wanted, lhs, rhs, bias) -> None:
    """Forward and gradient compile to no collective more than unfused: the epilogue, and the
    pre-activation that the gradient needs, are where the result goes."""

    def dense(x, w, b):
        z = so.gemm(x, w, out_sharding=wanted)
        return jax.nn.gelu(z if bias is None else z + b)

    x, w = draw(rng, 8, DIM), draw(rng, DIM, DIM)
    args = [
        meshes.place(mesh, a, *spec)
        for a, spec in ((x, lhs), (w, rhs), (draw(rng, DIM), bias or (None,)))
    ]
    for wrap in (lambda f: f, values_and_gradients):
        before, after = (
            hlo.summary(jax.jit(wrap(f)).lower(*args).compile()) for f in (dense, so.fuse(dense))
        )
        for kind, (count, size) in after.items():
            assert kind in before
            assert count <= before[kind][0]
            assert size <= before[kind][1]
    report = assert_same(dense, *args)
    assert kinds(report) == {"activation" if bias is None else "bias+activation": 1}


def test_sums_of_the_result_keep_the_epilogue(explicit_mesh, rng) -> None:
    """A reduce-scatter to where the result is wanted is no move after the product."""
    x = meshes.place(explicit_mesh, draw(rng, 8, DIM), "dp", "tp")
    w = meshes.place(explicit_mesh, draw(rng, DIM, DIM), "tp", None)
    b = meshes.place(explicit_mesh, draw(rng, DIM), "tp")
    dense = lambda x, w, b: jax.nn.gelu(so.gemm(x, w, out_sharding=P("dp", "tp")) + b)  # noqa: E731
    assert kinds(assert_same_and_no_more_moves(dense, x, w, b)) == {"bias+activation": 1}


def test_scans_on_meshes(mesh, rng) -> None:
    p, x = placed(mesh, rng)
    found = kinds(assert_same_and_no_more_moves(scanned, p, x))
    assert found == {"return_input": 1, "bias+activation": 1}


@pytest.mark.parametrize("kind", ["explicit-auto", "auto-explicit"])
def test_blocks_on_mixed_meshes(kind, rng) -> None:
    with meshes.entered(kind) as mesh:
        p, x = placed(mesh, rng)
        fused = so.fuse(sharded_blocks)
        want, got = jax.jit(sharded_blocks)(p, x), jax.jit(fused)(p, x)
        assert jax.typeof(got) == jax.typeof(want)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert kinds(fused.report) == TWO_BLOCKS
        assert fused.report.missed == ()


@pytest.mark.parametrize(
    ("kind", "axes"), [("auto", ("dp",)), ("explicit", ("dp",)), ("explicit", ("dp", "tp"))]
)
def test_shard_map_bodies(kind, rng, axes) -> None:
    """Inside a shard_map, with `fuse` around it: what varies and what does not is matched."""
    with meshes.entered(kind) as mesh:
        p, x = placed(mesh, rng)
        p = {k: meshes.place(mesh, a, *(None,) * a.ndim) for k, a in p.items()}
        rows = P(*axes, *(None,) * (3 - len(axes)))
        x = meshes.place(mesh, x, *rows)

        def mapped(p, x):
            body = lambda p, x: (two_blocks(p, x), jax.lax.psum(x.sum(), axes))  # noqa: E731
            specs = (jax.tree.map(lambda a: P(), p), rows)
            return jax.shard_map(body, in_specs=specs, out_specs=(rows, P()), axis_names={*axes})(
                p, x
            )

        assert kinds(assert_same_and_no_more_moves(mapped, p, x)) == TWO_BLOCKS


def test_a_fused_function_in_a_shard_map(explicit_mesh, rng) -> None:
    mesh = explicit_mesh
    p, x = placed(mesh, rng)
    p = {k: meshes.place(mesh, a, *(None,) * a.ndim) for k, a in p.items()}
    fused = so.fuse(scan_of_blocks)
    both = []
    for fn in (scan_of_blocks, fused):
        specs = (jax.tree.map(lambda a: P(), p), P("dp", "tp", None))
        mapped = jax.shard_map(fn, in_specs=specs, out_specs=P("dp", "tp", None))
        both.append(jax.jit(values_and_gradients(mapped))(p, x))
    for got, want in zip(jax.tree.leaves(both[1]), jax.tree.leaves(both[0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
    assert kinds(fused.report) == TWO_BLOCKS


def scan_of_blocks(p, x):
    return jax.lax.scan(lambda x, _: (two_blocks(p, x), None), x, None, length=2)[0]


def test_out_shardings_are_kept(auto_mesh, rng) -> None:
    p, x = placed(auto_mesh, rng)
    wanted = jax.NamedSharding(auto_mesh, P(None, None, "tp"))
    inner = jax.jit(two_blocks, out_shardings=wanted)
    for fn in (so.fuse(inner), jax.jit(so.fuse(two_blocks), out_shardings=wanted)):
        assert fn(p, x).sharding.is_equivalent_to(wanted, 3)


def test_terms_that_are_sharded_otherwise_are_left_alone(explicit_mesh, rng) -> None:
    x = meshes.place(explicit_mesh, draw(rng, 8, DIM), "dp", None)
    whole = meshes.place(explicit_mesh, draw(rng, 8, DIM), None, None)
    gamma = meshes.place(explicit_mesh, draw(rng, DIM), None)
    report = so.fuse(lambda x, y, g: so.rms_norm(x + y, g)).explain(x, whole, gamma)
    assert [m.why for m in report.missed] == [
        "the terms of the sum before it are not sharded alike"
    ]


def test_a_sum_left_open_takes_no_epilogue(explicit_mesh, rng) -> None:
    lhs = meshes.place(explicit_mesh, draw(rng, 8, DIM), None, "tp")
    rhs = meshes.place(explicit_mesh, draw(rng, DIM, HIDDEN), "tp", None)
    open_sum = P(None, None, unreduced={"tp"})
    fn = lambda x, w: jax.nn.silu(jax.reshard(so.gemm(x, w, out_sharding=open_sum), P()))  # noqa: E731
    fused = so.fuse(fn)
    np.testing.assert_array_equal(fused(lhs, rhs), fn(lhs, rhs))
    assert fused.report.fused == ()


# ---- a model fused by hand -----------------------------------------------------------------------


def test_a_model_is_what_was_fused_by_hand(explicit_mesh, rng) -> None:
    """Its fusions are written out. Without them, `fuse` finds each: the same ops, bit for bit
    the same loss, gradients within rounding, and the same collectives."""
    host = model.parameters(dim=DIM, layers=2, heads=4, seq=8, vocabulary=32, seed=0)
    specs = model.specs(2)
    params = jax.tree.map(lambda a, s: meshes.place(explicit_mesh, a, *s), host, specs)
    tokens = rng.integers(0, 32, (4, 9), np.int32)
    batch = [meshes.place(explicit_mesh, tokens[:, n : n + 8], "dp", "tp") for n in (0, 1)]
    apart = so.fuse(partial(model.loss, ops=model.APART))
    by_hand = partial(model.loss, ops=model.BY_HAND)
    traced = [
        jax.jit(jax.value_and_grad(f)).trace(params, *batch)
        for f in (apart, by_hand, partial(model.loss, ops=model.APART))
    ]
    got, want = (t.lower().compile() for t in traced[:2])
    (loss, grads), (wanted, wanted_grads) = got(params, *batch), want(params, *batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)
    ops = [ops_in(t.jaxpr) for t in traced]
    assert ops[0] == ops[1]
    assert ops[2]["backward, residual"] == 0
    assert (ops[0]["norm, add"], ops[0]["backward, residual"]) == (4, 4)
    assert hlo.summary(got) == hlo.summary(want)
