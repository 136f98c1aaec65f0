"""Norms, softmax and quantisation on real collectives, on each route."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import cases, meshes, references
from tests.closeness import assert_shards_close
from tests.multi_gpu import grid
from tests.primitives import test_softmax_reference as oracle
from tests.quantize.quantisers import FORMATS, RECIPES, ROLES, wide_range
from tests.quantize.test_quantize_routes import same

B, S, H = 8, 64, 384
ROUTES = (*grid.KINDS, "manual")
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def on(route, f, specs, out):
    """f as it is called on a route, by a shard_map where all axes are manual."""
    return jax.shard_map(f, in_specs=specs, out_specs=out) if route == "manual" else f


def entered(route):
    return grid.entered("auto" if route == "manual" else route)


@each_dtype
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("spec", [P("dp", "tp"), P(("dp", "tp"))], ids=["sequence", "batch"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norm_and_its_gradient(rng, op, spec, route, dtype):
    x, add, dy = (cases.random(rng, (B, S, H), dtype) for _ in range(3))
    gamma, beta = cases.random(rng, H), cases.random(rng, H)
    vectors = (gamma, beta) if op == "layer_norm" else (gamma,)
    with entered(route) as mesh:
        norm = on(
            route,
            lambda x, add, *vectors: getattr(so, op)(x, *vectors, add=add),
            (spec, spec, *(P(),) * len(vectors)),
            spec,
        )

        @jax.jit
        def step(x, add, vectors, dy):
            y, pull = jax.vjp(norm, x, add, *vectors)
            return y, pull(dy)

        placed = (meshes.place(mesh, a, *spec) for a in (x, add))
        y, (dx, dadd, dgamma, *dbeta) = step(*placed, vectors, meshes.place(mesh, dy, *spec))
    value, vjp = (getattr(references, f"{op}_{part}reference") for part in ("", "vjp_"))
    want = vjp(dy, x, gamma, add=add)
    assert_shards_close(y, value(x, *vectors, add=add).y, reduced=H, roundings=2)
    assert_shards_close(dx, want.x, reduced=H, roundings=2)
    assert_shards_close(dadd, want.x, reduced=H, roundings=2)
    # Where x + add is rounded, each of the rows' terms is off by that.
    off = 1 if dtype == "float32" else 2**8
    assert_shards_close(dgamma, want.gamma, reduced=B * S, roundings=off)
    for one in dbeta:
        assert_shards_close(one, dy.astype(np.float64).sum((0, 1)), reduced=B * S)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norm_of_a_sharded_row(mesh, rng, op):
    x = cases.random(rng, (B, S, H)) + np.float32(3)
    gamma = cases.random(rng, H)
    vectors = (gamma,) * (2 if op == "layer_norm" else 1)
    norm = jax.jit(getattr(so, op))
    held = [meshes.place(mesh, v, "tp") for v in vectors]
    y = norm(meshes.place(mesh, x, "dp", None, "tp"), *held)
    want = getattr(references, f"{op}_reference")(x, *vectors).y
    assert_shards_close(y, want, reduced=H)


@each_dtype
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("causal", [None, "upper_left"])
def test_softmax_and_its_gradient(rng, causal, route, dtype):
    """Of scores, batch over dp and heads over tp."""
    shape, spec = (4, 8, 32, 96), P("dp", "tp")
    x, dy = (cases.random(rng, shape, dtype) for _ in range(2))
    with entered(route) as mesh:
        softmax = on(route, lambda x: so.softmax(x, scale=0.5, causal=causal), spec, spec)

        @jax.jit
        def step(x, dy):
            y, pull = jax.vjp(softmax, x)
            return y, *pull(dy)

        y, dx = step(*(meshes.place(mesh, a, *spec) for a in (x, dy)))
    assert_shards_close(
        y, oracle.softmax_reference(x, scale=0.5, causal=causal), reduced=shape[-1], roundings=1
    )
    want = oracle.softmax_vjp_reference(dy, x, scale=0.5, causal=causal)
    assert_shards_close(dx, want, reduced=shape[-1], roundings=6)


@pytest.mark.parametrize("kind", grid.KINDS)
def test_softmax_of_a_sharded_row(rng, kind):
    x = 4 * cases.random(rng, (B, S, H))
    with grid.entered(kind) as mesh:
        y = jax.jit(so.softmax)(meshes.place(mesh, x, "dp", None, "tp"))
    assert_shards_close(y, oracle.softmax_reference(x), reduced=H, roundings=4)


# ---- quantisation --------------------------------------------------------------------------------


def on_one_device(x, recipe, role):
    """Rows and columns by the first device, whatever mesh is the ambient one."""
    with meshes.entered("auto", {"one": 1}):
        return jax.jit(so.quantize)(x, RECIPES[recipe].quantizer(role, "both")).detach()


@each_dtype
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_bits_are_those_of_one_device(mesh, rng, recipe, dtype):
    """An outlier that one device alone sees; of whole blocks one number moves, or two."""
    x = wide_range(rng, (256, 1024), cases.DTYPES[dtype])
    x[0, 0] = 1e6
    moved = {"delayed": {"all-reduce": (1, 4)}, "current": {"all-reduce": (1, 8)}}.get(recipe, {})
    f = jax.jit(so.quantize)
    for n, spec in enumerate((("dp", "tp"), (None, ("tp", "dp")))):
        quantizer = RECIPES[recipe].quantizer(ROLES[n], "both")
        want = on_one_device(x, recipe, ROLES[n])
        placed = meshes.place(mesh, x, *spec)
        same(f(placed, quantizer).detach(), want, spec)
        assert hlo.summary(f.lower(placed, quantizer).compile()) == moved


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_bits_where_shards_cut_blocks(mesh, rng, recipe):
    x = wide_range(rng, (96, 1376))
    quantizer = RECIPES[recipe].quantizer("input", "both")
    got = jax.jit(so.quantize)(meshes.place(mesh, x, "dp", "tp"), quantizer)
    same(got.detach(), on_one_device(x, recipe, "input"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_quantised_norm_is_within_its_format(mesh, rng, op, recipe):
    x = cases.random(rng, (B, S, 512), "bfloat16")
    vectors = (cases.random(rng, 512),) * (2 if op == "layer_norm" else 1)
    quantizer = RECIPES[recipe].quantizer("input", "rows")
    norm = jax.jit(lambda x, v, q: getattr(so, op)(x, *v, quantizer=q))
    got = norm(meshes.place(mesh, x, "dp", "tp"), vectors, quantizer)
    exact = getattr(references, f"{op}_reference")(x, *vectors).y
    relative, smallest, _ = FORMATS["float8_e4m3fn"]
    # An eighth of what is above the format's largest value is lost by scales of MXFP8 at most.
    lost = 0.125 if recipe == "mxfp8" else relative
    values = np.asarray(got.dequantize(jnp.float32)).astype(np.float64)
    step = np.asarray(got.scale_inv).astype(np.float64).max()
    allowed = lost * 1.01 * np.abs(exact) + 2 * smallest * step + 1e-6
    assert (np.abs(values - exact) <= allowed).all()
    if got.amax is not None:
        for shard in got.amax.addressable_shards:
            np.testing.assert_allclose(shard.data, np.abs(exact).max(), rtol=1e-5)
