"""Deferred data-parallel reduction: parameters typed `reduced` get cotangents that are unreduced.

Gradients of several microbatches are then added without communication, and summed over the mesh
once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import meshes
from tests.closeness import assert_shards_close

MICROBATCHES, B, S, K, N = 4, 8, 16, 64, 48
SHAPES = {"w": (K, N), "bias": (N,), "gamma": (K,), "beta": (K,), "scale": (N,)}


def block(p, x):
    """Both norms, a product with bias and activation."""
    h = so.layer_norm(x, p["gamma"], p["beta"])
    y = so.gemm(h, p["w"], bias=p["bias"], activation="gelu", batch_dims=((0, 1), ()))
    return so.rms_norm(y, p["scale"])


def plain_block(p, x):
    centred = x - x.mean(-1, keepdims=True)
    h = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    y = jax.nn.gelu((h * p["gamma"] + p["beta"]) @ p["w"] + p["bias"])
    return y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def problem(rng):
    p = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    p["w"] *= K**-0.5
    xs = rng.standard_normal((MICROBATCHES, B, S, K)).astype(np.float32)
    cs = rng.standard_normal((MICROBATCHES, B, S, N)).astype(np.float32)

    def loss(p):
        with jax.enable_x64(True):
            return sum(jnp.sum(plain_block(p, x) * c) for x, c in zip(xs, cs, strict=True))

    with jax.enable_x64(True):
        wide = {n: np.asarray(a, np.float64) for n, a in p.items()}
        want = jax.grad(loss)(wide)
    return p, xs, cs, want


def accumulated(p, xs, cs, zeros, f=block):
    """Gradients summed over the microbatches."""

    def step(total, batch):
        x, c = batch
        gradients = jax.grad(lambda p: jnp.sum(f(p, x) * c))(p)
        return jax.tree.map(jnp.add, total, gradients), None

    return jax.lax.scan(step, zeros, (xs, cs))[0]


@pytest.mark.parametrize("axes", [("dp",), ("dp", "tp")], ids="+".join)
def test_deferred_one_all_reduce_a_parameter(rng, axes):
    """Rows over dp, or batch over dp and sequence over tp; 4 microbatches in a scan."""
    p, xs, cs, want = problem(rng)
    rows = ("dp", "tp") if len(axes) == 2 else ("dp",)
    with meshes.entered("explicit") as mesh:
        typed = jax.device_put(p, jax.NamedSharding(mesh, P(reduced={*axes})))
        xs, cs = (meshes.place(mesh, a, None, *rows) for a in (xs, cs))

        def gradients(p, xs, cs):
            open_sum = P(unreduced={*axes})
            zeros = jax.tree.map(lambda a: jax.reshard(jnp.zeros(a.shape), open_sum), p)
            total = accumulated(p, xs, cs, zeros)
            assert all(jax.typeof(t).sharding.spec.unreduced == {*axes} for t in total.values())
            return jax.tree.map(lambda t: jax.reshard(t, P()), total)

        step = jax.jit(gradients)
        found = hlo.collectives(step.lower(typed, xs, cs).compile())
        # XLA may combine them; each parameter is in one.
        assert {c.kind for c in found} == {"all-reduce"}
        assert sum(c.arrays for c in found) == len(SHAPES)
        assert sum(c.bytes for c in found) == 4 * sum(a.size for a in p.values())
        got = step(typed, xs, cs)
    for name, gradient in got.items():
        assert_shards_close(gradient, want[name], reduced=MICROBATCHES * B * S * K, what=name)


def test_deferred_sum_of_a_sharded_weight_keeps_its_other_axes(rng):
    """Column parallel: tp shards the weight, the sum over dp stays open."""
    p, xs, cs, _ = problem(rng)
    with meshes.entered("explicit") as mesh:
        w = jax.device_put(p["w"], jax.NamedSharding(mesh, P(None, "tp", reduced={"dp"})))
        x, c = meshes.place(mesh, xs[0], "dp"), meshes.place(mesh, cs[0], "dp", None, "tp")
        f = jax.jit(jax.grad(lambda w, x, c: jnp.sum(so.gemm(x, w) * c)))
        gradient = f(w, x, c)
        assert jax.typeof(gradient).sharding.spec == P(None, "tp", unreduced={"dp"})
        assert not hlo.collectives(f.lower(w, x, c).compile())
        total = jax.jit(lambda g: jax.reshard(g, P(None, "tp")))(gradient)
    want = np.einsum("bsk,bsn->kn", xs[0].astype(np.float64), cs[0])
    assert_shards_close(total, want, reduced=B * S)


@pytest.mark.parametrize("op", ["gemm", "layer_norm", "rms_norm"])
def test_deferred_sum_where_rows_are_whole_is_right(rng, op):
    """Nothing to defer: each device has the whole gradient, and its sum over dp must be that."""
    p, xs, cs, _ = problem(rng)
    x, c = xs[0], cs[0] if op == "gemm" else xs[1]

    def f(w, x):
        return so.gemm(x, w) if op == "gemm" else getattr(so, op)(x, w)

    weight = p["w"] if op == "gemm" else p["gamma"]
    with meshes.entered("explicit") as mesh:
        typed = jax.device_put(weight, jax.NamedSharding(mesh, P(reduced={"dp"})))
        placed = [meshes.place(mesh, a) for a in (x, c)]
        gradient = jax.jit(jax.grad(lambda w, x, c: jnp.sum(f(w, x) * c)))(typed, *placed)
        assert jax.typeof(gradient).sharding.spec.unreduced == {"dp"}
        total = jax.jit(lambda g: jax.reshard(g, P()))(gradient)
    want = jax.grad(lambda w: jnp.sum(f(w, x) * c))(weight)
    assert_shards_close(total, np.asarray(want, np.float64), reduced=B * S)


def test_unreduced_result_is_summed_by_whoever_reshards_it(rng):
    p, xs, *_ = problem(rng)
    with meshes.entered("explicit") as mesh:
        x, w = meshes.place(mesh, xs[0], "dp", None, "tp"), meshes.place(mesh, p["w"], "tp")

        def partial(x, w):
            return so.gemm(x, w, out_sharding=P("dp", unreduced={"tp"}))

        partials = jax.jit(partial)
        assert not hlo.collectives(partials.lower(x, w).compile())
        assert jax.typeof(partials(x, w)).sharding.spec.unreduced == {"tp"}
        both = jax.jit(lambda x, w: jax.reshard(partial(x, w) + partial(x, 2 * w), P("dp")))
        found = hlo.summary(both.lower(x, w).compile())
        assert found == {"all-reduce": (1, 4 * B // 2 * S * N)}
        out = both(x, w)

        def loss(w, x):
            return jnp.sum(jnp.sin(jax.reshard(partial(x, w), P("dp"))))

        slope = jax.jit(jax.grad(loss))(w, x)
    want = np.einsum("bsk,kn->bsn", xs[0].astype(np.float64), 3 * p["w"].astype(np.float64))
    assert_shards_close(out, want, reduced=K)
    slope_want = np.einsum("bsk,bsn->kn", xs[0].astype(np.float64), np.cos(want / 3))
    assert_shards_close(slope, slope_want, reduced=B * S)


def test_deferred_by_hand_inside_shard_map(rng):
    """A parameter that varies over dp has gradients for each device: one sum at the end."""
    p, xs, cs, want = problem(rng)
    with meshes.entered("auto", {"dp": 8}) as mesh:

        def body(p, xs, cs):
            mine = jax.tree.map(lambda a: jax.lax.pcast(a, "dp", to="varying"), p)
            zeros = jax.tree.map(jnp.zeros_like, mine)
            total = accumulated(mine, xs, cs, zeros)
            return jax.tree.map(lambda t: jax.lax.psum(t, "dp"), total)

        rows = P(None, "dp")
        step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P()))
        arrays = (p, *(meshes.place(mesh, a, *rows) for a in (xs, cs)))
        found = hlo.collectives(step.lower(*arrays).compile())
        assert {c.kind for c in found} == {"all-reduce"}
        assert sum(c.arrays for c in found) == len(SHAPES)
        got = step(*arrays)
    for name, gradient in got.items():
        assert_shards_close(gradient, want[name], reduced=MICROBATCHES * B * S * K, what=name)


def test_unreduced_operands_and_what_comes_after_an_open_sum_are_refused():
    with meshes.entered("explicit") as mesh:
        x, w = (
            meshes.place(mesh, jnp.ones((8, 16)), None, "tp"),
            meshes.place(mesh, jnp.ones((16, 8))),
        )
        pending = jax.jit(lambda w: jax.reshard(w, P(unreduced={"dp"})))(w)
        with pytest.raises(NotImplementedError, match=r"gemm: rhs, .* expected no unreduced"):
            so.gemm(x, pending)
        with pytest.raises(NotImplementedError, match=r"softmax: x, .* expected no unreduced"):
            so.softmax(pending)
        with pytest.raises(ValueError, match="activation, which come after the sum"):
            so.gemm(x, w, activation="relu", out_sharding=P(unreduced={"tp"}))
        with pytest.raises(ValueError, match="no reduced axes"):
            so.gemm(x, w, out_sharding=P(reduced={"tp"}))
    with meshes.entered("explicit-auto") as mesh:
        w = jax.device_put(jnp.ones((16, 8)), jax.NamedSharding(mesh, P(reduced={"dp"})))
        with pytest.raises(NotImplementedError, match="where not all axes are Explicit"):
            jax.jit(jax.grad(lambda w: jnp.sum(so.gemm(jnp.ones((4, 16)), w))))(w)
    with (
        meshes.entered("auto"),
        pytest.raises(NotImplementedError, match="axes that are not Explicit"),
    ):
        so.gemm(jnp.ones((8, 16)), jnp.ones((16, 8)), out_sharding=P(unreduced={"tp"}))
