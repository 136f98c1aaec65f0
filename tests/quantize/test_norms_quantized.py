"""Norms with `quantizer=`: bits of the quantised float32 norm, gradients, routes, what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import cases, meshes
from tests.quantize.quantisers import RECIPES, bits, float64

each_recipe = pytest.mark.parametrize("name", RECIPES)
OPS = ("layer_norm", "rms_norm")
each_op = pytest.mark.parametrize("op", OPS)


def norm(op, x, gamma, **options):
    vectors = (gamma, gamma) if op == "layer_norm" else (gamma,)
    return getattr(so, op)(x, *vectors, **options)


def apart(op, x, gamma, quantizer, add=None, **options):
    """The norm of the same h in float32, then `so.quantize`."""
    h = x if add is None else (x.astype(jnp.float32) + add.astype(jnp.float32)).astype(x.dtype)
    return so.quantize(norm(op, h.astype(jnp.float32), gamma, **options), quantizer), h


def arrays(rng, shape, dtype):
    x, add = (jnp.asarray(cases.random(rng, shape, dtype)) for _ in range(2))
    return x, add, jnp.asarray(cases.random(rng, shape[-1:]))


@each_op
@each_recipe
def test_bits_of_the_quantised_float32_norm(rng, name, op):
    """Not rounded to the dtype of x between: fused and apart are the same."""
    calls = [
        ("bfloat16", (160, 96), "both", {"zero_centered_gamma": True}),
        ("float16", (2, 3, 160), "rows", {"return_input": True}),
    ]
    for dtype, shape, layout, options in calls:
        x, add, gamma = arrays(rng, shape, dtype)
        quantizer = RECIPES[name].quantizer("input", layout)
        residual = {"add": add} if options.get("return_input") else {}
        fused = jax.jit(lambda x, g, q, r, o=options: norm(op, x, g, quantizer=q, **r, **o))(
            x, gamma, quantizer, residual
        )
        zero = {k: v for k, v in options.items() if k != "return_input"}
        y, h = jax.jit(lambda x, g, q, r, z=zero: apart(op, x, g, q, **r, **z))(
            x, gamma, quantizer, residual
        )
        if residual:
            fused, got_h = fused
            assert bits(got_h) == bits(h)
        assert fused.dtype == x.dtype
        assert fused.shape == shape
        assert bits(fused.detach()) == bits(y.detach()), (dtype, shape)


@each_op
def test_rounding_once_is_closer_than_twice(rng, op):
    """What the decision buys: with the same scale the mean error against float64 is smaller."""
    x, _, gamma = arrays(rng, (64, 512), "bfloat16")
    quantizer = RECIPES["delayed"].quantizer().update(jnp.float32(16))
    wide = float64(x)
    if op == "layer_norm":
        wide = wide - wide.mean(-1, keepdims=True)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * float64(gamma)
    if op == "layer_norm":
        want = want + float64(gamma)
    once = norm(op, x, gamma, quantizer=quantizer)
    twice = so.quantize(norm(op, x, gamma), quantizer)
    errors = [np.abs(float64(s.dequantize(jnp.float32)) - want) for s in (once, twice)]
    assert errors[0].mean() < errors[1].mean()
    assert (errors[0] <= np.maximum(np.abs(want) / 16, 16 / 448 / 1024) * (1 + 1e-5)).all()


@each_op
@each_recipe
def test_gradients_are_those_of_the_norm(rng, explicit_mesh, name, op):
    """Straight through: cotangents of y and of h into the norm's own backward, bit for bit."""
    x, add, gamma = arrays(rng, (8, 16, 64), "bfloat16")
    c, d = (cases.random(rng, (8, 16, 64), "bfloat16") for _ in range(2))
    x, add, c, d = (meshes.place(explicit_mesh, a, "dp", "tp") for a in (x, add, c, d))
    quantizer = RECIPES[name].quantizer("input", "rows")

    def quantised(x, gamma, add):
        y, h = norm(op, x, gamma, add=add, return_input=True, quantizer=quantizer)
        return y.dequantize(), h

    def plain(x, gamma, add):
        return norm(op, x, gamma, add=add, return_input=True)

    gradients = [
        jax.jit(lambda x, g, a, f=f: jax.vjp(f, x, g, a)[1]((c, d)))(x, gamma, add)
        for f in (quantised, plain)
    ]
    assert bits(gradients[0]) == bits(gradients[1])


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_second_derivatives(rng, name):
    """As of y + stop_gradient(quantised - y)."""
    x, _, gamma = arrays(rng, (4, 64), "float32")
    quantizer = RECIPES[name].quantizer()

    def quantised(x):
        return so.rms_norm(x, gamma, quantizer=quantizer).dequantize()

    def by_hand(x):
        y = so.rms_norm(x, gamma)
        return y + jax.lax.stop_gradient(quantised(x) - y)

    def second(f):
        loss = jax.grad(lambda x: jnp.sum(f(x) ** 3))
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(loss(x)))))(x)

    got, want = map(np.asarray, (second(quantised), second(by_hand)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@each_recipe
def test_every_route_gives_the_bits_of_one_device(rng, any_mesh, name):
    """Rows over any axes: statistics are of whole rows."""
    x, add, gamma = arrays(rng, (8, 128, 256), "bfloat16")
    quantizer = RECIPES[name].quantizer("input", "both")

    def f(x, add, gamma):
        return so.layer_norm(x, gamma, gamma, add=add, return_input=True, quantizer=quantizer)

    want = jax.jit(f)(x, add, gamma)
    placed = [meshes.place(any_mesh, a, "dp", "tp") for a in (x, add)]
    got = jax.jit(f)(*placed, gamma)
    assert bits(got) == bits(want)
    for part in (got[0].data, got[1]):
        assert meshes.same(part.sharding.spec, P("dp", "tp"))


@each_recipe
def test_moves_what_norm_and_quantiser_move(mesh, name):
    x = meshes.place(mesh, jnp.ones((8, 128, 256)), "dp", "tp")
    gamma = jnp.ones(256)
    quantizer = RECIPES[name].quantizer("input", "both")

    def f(x):
        return so.rms_norm(x, gamma, quantizer=quantizer)

    # A device has 4 x 32 rows: of blocks along them, 32 are whole and 128 are not.
    want = {"delayed": {"all-reduce": (1, 4)}, "current": {"all-reduce": (1, 8)}, "mxfp8": {}}
    found = hlo.collectives(jax.jit(f).lower(x).compile())
    if name == "block":
        assert ("all-gather", 4 * 4 * 128 * 256) in [(c.kind, c.bytes) for c in found]
    else:
        assert hlo.summary(found) == want[name]
    assert all(hlo.asked_by(c) in ("shardops.rms_norm", "shardops.quantize") for c in found)


@pytest.mark.parametrize("stats", ["distributed", "gather"])
@each_recipe
def test_sharded_rows_are_quantised_where_they_lie(rng, mesh, name, stats):
    """h over tp: sums of statistics, and the largest magnitude; the data end as y would."""
    x, _, gamma = arrays(rng, (16, 1024), "float32")
    quantizer = RECIPES[name].quantizer("input", "rows")

    def f(x):
        return so.rms_norm(x, gamma, quantizer=quantizer, stats=stats)

    want = jax.jit(f)(x)
    placed = meshes.place(mesh, x, "dp", "tp")
    got = jax.jit(f)(placed)
    values = [float64(one.dequantize()) for one in (got, want)]
    # Sums in another order: scales differ in the last bit, and some data round to the next number.
    apart = np.abs(values[0] - values[1])
    assert (apart <= np.abs(values[1]).max() / 8).all()
    assert (apart > 1e-5 * np.abs(values[1])).mean() < 1e-2
    assert meshes.same(got.data.sharding.spec, P("dp", "tp") if stats != "gather" else P("dp"))
    kinds = {c.kind for c in hlo.collectives(jax.jit(f).lower(placed).compile())}
    assert ("all-gather" in kinds) == (stats == "gather")


def test_rows_whose_shards_break_a_block_are_gathered(rng, mesh):
    x, _, gamma = arrays(rng, (16, 192), "float32")
    quantizer = RECIPES["mxfp8"].quantizer()

    def f(x):
        return so.rms_norm(x, gamma, quantizer=quantizer)

    got = jax.jit(f)(meshes.place(mesh, x, "dp", "tp"))
    assert bits(got.detach()) == bits(jax.jit(f)(x).detach())


@each_recipe
def test_vmap_and_scan(rng, name):
    x, _, gamma = arrays(rng, (3, 8, 64), "float32")
    quantizer = RECIPES[name].quantizer("input", "both")

    def f(x, gamma=gamma):
        return so.rms_norm(x, gamma, quantizer=quantizer)

    each = [f(one) for one in x]
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    assert bits(jax.jit(jax.vmap(f))(x)) == bits(want)
    scanned = jax.jit(lambda x: jax.lax.scan(lambda _, one: (None, f(one)), None, x)[1])(x)
    assert bits(scanned) == bits(want)
    gammas = jnp.stack([gamma, 2 * gamma, gamma])
    by_gamma = jax.jit(jax.vmap(f))(x, gammas)
    assert bits(jax.tree.map(lambda a: a[0], by_gamma)) == bits(each[0])


def test_kernels_are_told_the_form():
    """One local op has all that CUDA needs: the norm and what is quantised of it."""
    x, gamma = jnp.ones((64, 256), jnp.bfloat16), jnp.ones(256)
    jaxpr = str(
        jax.make_jaxpr(lambda x: so.rms_norm(x, gamma, quantizer=RECIPES["block"].quantizer()))(x)
    )
    assert "shardops_norm_forward" in jaxpr
    assert "shardops_quantize" not in jaxpr
