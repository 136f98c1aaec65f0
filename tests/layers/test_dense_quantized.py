"""Dense layers of quantised operands: each product against one in float64 of what was rounded."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import cases, meshes
from tests.closeness import assert_shards_close
from tests.layers import eight_bits
from tests.layers.eight_bits import RECIPES

SIZES = {"dp": 2, "tp": 2}
B, S, K, N = 2, 256, 256, 256
EXHAUSTIVE = os.environ.get("SHARDOPS_EXHAUSTIVE") == "1"
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def drawn(rng, dtype, *shapes):
    return [cases.random(rng, shape, dtype, scale) for shape, scale in shapes]


def value_and_vjp(f, x, kernel, bias, dz, qs):
    """y, cotangents of x, kernel and bias, and what is seen of x, kernel and dz."""

    @jax.jit
    def run(x, kernel, bias, dz, qs):
        def loss(x, kernel, bias, qs):
            y = f(x, kernel, bias, so.recipes.watch(qs))
            return jnp.sum(y.astype(jnp.float32) * dz.astype(jnp.float32)), y

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, kernel, bias, qs)

    (_, y), (dx, dkernel, dbias, seen) = run(x, kernel, bias, dz, qs)
    return y, dx, dkernel, dbias, seen


def check(got, x, kernel, bias, dz, qs, roundings=1):
    """x [*rows, k] and dz [*rows, n] flattened, everything against the reference."""
    y, dx, dkernel, dbias, seen = got
    flat = [np.asarray(a).reshape(-1, a.shape[-1]) for a in (x, dz)]
    want_y, want_dx, want_dkernel = eight_bits.dense_and_vjp(flat[0], kernel, flat[1], qs)
    want_y = want_y + np.asarray(bias).astype(np.float64)
    # One more rounding: a product in float32 takes products of scales, and rounds them.
    assert_shards_close(y, want_y.reshape(y.shape), reduced=K, roundings=2, what="y")
    assert_shards_close(dx, want_dx.reshape(x.shape), reduced=N, roundings=2, what="dx")
    rows = flat[0].shape[0]
    assert_shards_close(dkernel, want_dkernel, reduced=rows, roundings=2, what="dkernel")
    sums = flat[1].astype(np.float64).sum(0)
    assert_shards_close(dbias, sums, reduced=rows, roundings=2, what="dbias")
    if qs.input.scale_inv is not None:
        for role, array in (("input", x), ("kernel", kernel), ("gradient", dz)):
            amax = getattr(seen, role).scale_inv
            assert all(np.asarray(s.data) == np.abs(array).max() for s in amax.addressable_shards)


@each_recipe
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_on_one_device_is_the_product_of_rounded_operands(rng, recipe, dtype):
    x, kernel, bias, dz = drawn(
        rng, dtype, ((3, 40, 160), 1), ((160, 96), 0.1), ((96,), 1), ((3, 40, 96), 1e-3)
    )
    qs = eight_bits.quantizers(recipe, x, kernel, dz)
    with meshes.entered("auto", {"dp": 1}):  # rows may be merged: blocks cross their ends
        got = value_and_vjp(
            lambda x, w, b, q: so.dense(x, w, b, quantizers=q), x, kernel, bias, dz, qs
        )
    check(got, x, kernel, bias, dz, qs)


@pytest.mark.parametrize(
    ("recipe", "kind", "first"),
    [
        (recipe, kind, first)
        for recipe, kind, first in itertools.product(RECIPES, meshes.KINDS, ("batch", "sequence"))
        if EXHAUSTIVE
        or ((first == "sequence") == (kind == "explicit") and "-" not in kind)
        or (recipe, first) in (("delayed", "batch"), ("block", "sequence"))
    ],
)
def test_dense_on_a_mesh_is_the_product_of_rounded_operands(rng, recipe, kind, first):
    """Tensor and sequence parallel, batch first and sequence first: blocks along the sequence."""
    x, kernel, bias, dz = drawn(
        rng, "float32", ((B, S, K), 1), ((K, N), 0.1), ((N,), 1), ((B, S, N), 1e-3)
    )
    qs = eight_bits.quantizers(recipe, x, kernel, dz)
    turn = (lambda a: jnp.swapaxes(a, 0, 1)) if first == "sequence" else (lambda a: a)
    rows = ("tp", "dp") if first == "sequence" else ("dp", "tp")
    whole = (None, "dp") if first == "sequence" else ("dp", None)

    def f(x, kernel, bias, qs):
        like = ((int(first == "sequence"),), ())
        return so.dense(
            x, kernel, bias, quantizers=qs, batch_dims=like, out_sharding=P(*whole, "tp")
        )

    with meshes.entered(kind, SIZES) as mesh:
        got = value_and_vjp(
            f,
            meshes.place(mesh, turn(x), *rows),
            meshes.place(mesh, kernel, None, "tp"),
            meshes.place(mesh, bias, "tp"),
            meshes.place(mesh, turn(dz), *whole, "tp"),
            qs,
        )
    y, dx, *rest = got
    if first == "sequence":
        y, dx = (jax.device_put(turn(np.asarray(a))) for a in (y, dx))
    check((y, dx, *rest), x, kernel, bias, dz, qs)


@each_recipe
def test_dense_inside_shard_map(rng, recipe):
    """Rows over dp, by hand: the weight's gradient is summed, amaxes are those of all devices."""
    x, kernel, bias, dz = drawn(
        rng, "float32", ((B, S, K), 1), ((K, N), 0.1), ((N,), 1), ((B, S, N), 1e-3)
    )
    qs = eight_bits.quantizers(recipe, x, kernel, dz)
    if recipe == "current":  # a scale of each shard: not that of the array
        x, dz = (np.concatenate([a[:1]] * 2) for a in (x, dz))
    with meshes.entered("auto", {"dp": 2}) as mesh:
        specs = (P("dp"), P(), P(), P())

        def f(x, kernel, bias, qs):
            return so.dense(x, kernel, bias, quantizers=qs)

        mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("dp"))

        got = value_and_vjp(
            mapped,
            meshes.place(mesh, x, "dp"),
            meshes.place(mesh, kernel),
            meshes.place(mesh, bias),
            meshes.place(mesh, dz, "dp"),
            qs,
        )
    check(got, x, kernel, bias, dz, qs)


GENERAL = {
    # x, kernel, contracting dims, result
    "kernel by rows": ((4, 32, 64), (96, 64), ((-1,), (1,)), "bsk,nk->bsn"),
    "two contracted dims": ((4, 32, 8, 16), (8, 16, 64), ((2, 3), (0, 1)), "bshd,hdn->bsn"),
    "in another order": ((4, 16, 32, 8), (8, 16, 64), ((1, 3), (1, 0)), "bdsh,hdn->bsn"),
    "two features": ((4, 32, 64), (64, 8, 16), ((-1,), (0,)), "bsk,khd->bshd"),
    "features around": ((4, 32, 64), (8, 64, 16), ((-1,), (1,)), "bsk,hkd->bshd"),
    "x by columns": ((64, 4, 32), (64, 96), ((0,), (0,)), "kbs,kn->bsn"),
    "a vector": ((64,), (64, 96), ((0,), (0,)), "k,kn->n"),
    "one feature": ((32, 64), (64,), ((-1,), (0,)), "sk,k->s"),
}


@pytest.mark.parametrize(
    ("recipe", "name", "kind"),
    [
        (recipe, name, kind)
        for recipe, name, kind in itertools.product(RECIPES, GENERAL, ("none", "explicit", "auto"))
        if EXHAUSTIVE
        or (recipe == "block" and kind != "auto")
        or (kind, recipe) == ("none", "current")
    ],
)
def test_dense_contracts_any_dims(rng, recipe, name, kind):
    """Close to the product in float64, by the rounding of two operands each; heads over tp."""
    x_shape, kernel_shape, dims, letters = GENERAL[name]
    ins, out = letters.split("->")
    of_x, of_kernel = ins.split(",")
    x, kernel = (rng.standard_normal(s).astype(np.float32) for s in (x_shape, kernel_shape))
    sizes = dict(zip(of_x + of_kernel, (*x_shape, *kernel_shape), strict=True))
    dz = rng.standard_normal([sizes[d] for d in out]).astype(np.float32)
    axes = {"b": "dp", "h" if "h" in letters else "n": "tp"}

    qs = eight_bits.quantizers(recipe, x, kernel, dz, seen=1)

    @jax.jit
    def run(x, kernel, dz):
        def f(x, kernel):
            return so.dense(x, kernel, contracting_dims=dims, quantizers=so.recipes.watch(qs))

        y, pull = jax.vjp(f, x, kernel)
        return y, *pull(dz)

    if kind == "none":
        got = run(x, kernel, dz)
    else:
        with meshes.entered(kind, SIZES) as mesh:
            got = run(
                *(
                    meshes.place(mesh, a, *(axes.get(d) for d in names))
                    for a, names in ((x, of_x), (kernel, of_kernel), (dz, out))
                )
            )
    wide = [a.astype(np.float64) for a in (x, kernel, dz)]
    want = (
        np.einsum(letters, *wide[:2]),
        np.einsum(f"{out},{of_kernel}->{of_x}", wide[2], wide[1]),
        np.einsum(f"{of_x},{out}->{of_kernel}", wide[0], wide[2]),
    )
    bounds = (2 * eight_bits.E4M3**2, *(eight_bits.E4M3**2 + eight_bits.E5M2**2,) * 2)
    for one, other, bound in zip(got, want, bounds, strict=True):
        assert one.shape == other.shape
        off = np.linalg.norm(np.asarray(one) - other) / np.linalg.norm(other)
        assert off <= 1.2 * bound**0.5
