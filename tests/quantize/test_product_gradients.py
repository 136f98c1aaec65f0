"""Gradients of products of quantised operands: straight-through, by the values multiplied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import meshes
from tests.closeness import assert_close, assert_shards_close
from tests.kernels.scaled_calls import in_float64
from tests.quantize.quantisers import LAYOUTS, RECIPES, bits

M, K, N = 64, 256, 384
each_recipe = pytest.mark.parametrize("name", RECIPES)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def quantised(name, x, w, layout="rows"):
    of = RECIPES[name].quantizer
    return so.quantize(x, of("input", layout)), so.quantize(w, of("kernel", layout))


def product(name, layout="rows", **options):
    return lambda x, w: so.gemm(*quantised(name, x, w, layout), **options)


def pulled(f, c, *operands):
    return jax.jit(lambda c, *operands: jax.vjp(f, *operands)[1](c))(c, *operands)


@each_recipe
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cotangents_by_the_values_that_were_multiplied(rng, name, layout):
    """Of rows and columns it is the part that the product took."""
    x, w, c = normal(rng, M, K), normal(rng, K, N), normal(rng, M, N)
    a, b = jax.jit(lambda x, w: quantised(name, x, w, layout))(x, w)
    lhs = in_float64(a.upright())
    rhs = in_float64(b) if layout == "rows" else in_float64(b.transposed).T
    dx, dw = pulled(product(name, layout), c, x, w)
    assert_close(dx, c.astype(np.float64) @ rhs.T, reduced=N)
    assert_close(dw, lhs.T @ c.astype(np.float64), reduced=M)


@pytest.mark.parametrize(
    "text, contracting, batch",
    [
        ("km,kn->mn", ((0,), (0,)), None),
        ("mk,nk->mn", ((1,), (1,)), None),
        ("km,nk->mn", ((0,), (1,)), None),
        ("mjk,kjn->mn", ((1, 2), (1, 0)), None),
        ("mjk,jkn->mn", ((2, 1), (1, 0)), None),
        ("jmk,jkn->jmn", ((2,), (1,)), ((0,), (0,))),
        ("mkj,njk->jmn", ((1,), (2,)), ((2,), (1,))),
    ],
)
@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_dims_in_any_place(rng, name, text, contracting, batch):
    sizes = {"m": 40, "k": 64, "n": 48, "j": 3}
    terms, result = text.split("->")
    lhs, rhs = terms.split(",")
    x, w, c = (normal(rng, *(sizes[c] for c in term)) for term in (lhs, rhs, result))
    quantizer = RECIPES[name].quantizer()
    a, b = (in_float64(so.quantize(jnp.asarray(v), quantizer)) for v in (x, w))

    def f(x, w):
        operands = so.quantize(x, quantizer), so.quantize(w, quantizer)
        if batch:
            return so.dot_general(*operands, (contracting, batch))
        return so.gemm(*operands, contracting_dims=contracting)

    assert_close(jax.jit(f)(x, w), np.einsum(text, a, b), reduced=3 * sizes["k"])
    dx, dw = pulled(f, c, x, w)
    assert_close(dx, np.einsum(f"{result},{rhs}->{lhs}", c, b), reduced=sizes["n"])
    assert_close(dw, np.einsum(f"{lhs},{result}->{rhs}", a, c), reduced=sizes["m"])


@pytest.mark.parametrize("activation", [None, "gelu", "silu", "relu"])
def test_with_bias_add_and_activation(rng, activation):
    """Those of the same function of the dequantised operands."""
    x, w, c = normal(rng, M, K), normal(rng, K, N), normal(rng, M, N)
    bias, add = normal(rng, N), normal(rng, M, N)
    after = {None: lambda z: z, "gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu}

    def plain(x, w, bias, add):
        a, b = (s.dequantize() for s in quantised("block", x, w))
        return after[activation](jnp.dot(a, b, precision="highest") + add + bias)

    def fused(x, w, bias, add):
        scaled = quantised("block", x, w)
        return so.gemm(*scaled, bias=bias, add=add, activation=activation)

    got, want = (pulled(f, c, x, w, bias, add) for f in (fused, plain))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, reduced=K + N)


def test_one_operand_quantised(rng):
    """The other one, and dz, keep 16 bits: dz is rounded to its dtype."""
    x, w, c = (jnp.asarray(normal(rng, *s), jnp.bfloat16) for s in ((M, K), (K, N), (M, N)))
    quantizer = RECIPES["current"].quantizer("kernel")
    b = in_float64(so.quantize(w, quantizer))

    def f(x, w):
        return so.gemm(x, so.quantize(w, quantizer), out_dtype="float32")

    dx, dw = pulled(f, c.astype(jnp.float32), x, w)
    c64, x64 = (np.asarray(a).astype(np.float64) for a in (c, x))
    assert dx.dtype == dw.dtype == jnp.bfloat16
    assert_close(dx, c64 @ b.T, reduced=N)
    assert_close(dw, x64.T @ c64, reduced=M)


def test_constants_have_none(rng):
    """Of a frozen weight the product for its cotangent is not made."""
    x, w, c = normal(rng, M, K), normal(rng, K, N), normal(rng, M, N)
    a, b = (s.detach() for s in quantised("block", jnp.asarray(x), jnp.asarray(w)))

    def of_x(x, b, c):
        return jax.grad(lambda x: jnp.sum(so.gemm(quantised("block", x, w)[0], b) * c))(x)

    assert_close(jax.jit(of_x)(x, b, c), c.astype(np.float64) @ in_float64(b).T, reduced=N)
    products = str(jax.make_jaxpr(of_x)(x, b, c)).count("shardops_gemm_scaled")
    assert products == 2  # forward, and to x
    dc = jax.grad(lambda c: jnp.sum(so.gemm(a, b) * c))(jnp.asarray(c))
    assert_close(dc, in_float64(a) @ in_float64(b), reduced=K)


def test_second_derivatives(rng):
    x, w = normal(rng, 8, 32), normal(rng, 32, 16)

    def twice(f):
        first = jax.grad(lambda x, w: jnp.sum(f(x, w) ** 3), (0, 1))
        return jax.grad(lambda x, w: sum(jnp.sum(d**2) for d in first(x, w)), (0, 1))

    def plain(x, w):
        a, b = (s.dequantize() for s in quantised("mxfp8", x, w))
        return jnp.dot(a, b, precision="highest")

    got, want = (jax.jit(twice(f))(x, w) for f in (product("mxfp8"), plain))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, reduced=64)


@pytest.mark.parametrize("wrap", ["checkpoint", "scan", "vmap"])
def test_through_transformations(rng, wrap):
    x, w, c = normal(rng, 3, 8, 64), normal(rng, 3, 64, 32), normal(rng, 3, 8, 32)
    f = product("block", "both")

    def mapped(x, w):
        if wrap == "scan":
            return jax.lax.scan(lambda _, xw: (None, f(*xw)), None, (x, w))[1]
        if wrap == "vmap":
            return jax.vmap(f)(x, w)
        one = jax.checkpoint(f) if wrap == "checkpoint" else f
        return jnp.stack([one(x[i], w[i]) for i in range(3)])

    got = pulled(mapped, c, x, w)
    each = jax.jit(lambda c, x, w: jax.vjp(f, x, w)[1](c))
    want = [each(c[i], x[i], w[i]) for i in range(3)]
    for one, other in zip(got, zip(*want, strict=True), strict=True):
        assert_close(one, np.stack(other), reduced=64)


def test_a_scan_keeps_8_bits_between_the_passes():
    """What goes to `straight` needs no value of it: no array of x is kept for it."""
    quantizer = RECIPES["mxfp8"].quantizer()

    def loss(x, ws):
        def layer(x, w):
            return so.gemm(so.quantize(x, quantizer), so.quantize(w, quantizer)), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    text = jax.jit(jax.grad(loss, 1)).lower(jnp.ones((64, 128)), jnp.ones((7, 128, 128)))
    compiled = text.compile().as_text()
    assert "u8[7,64,128]" in compiled  # their bits
    assert "f32[7,64,128]" not in compiled


# --- on meshes ------------------------------------------------------------------------------------

LAYOUTS_ON_MESHES = [  # of dz, x, w
    (("dp", "tp"), ("dp",), (None, "tp")),  # column-parallel
    (("dp",), ("dp", "tp"), ("tp",)),  # row-parallel
    ((("dp", "tp"),),) * 3,  # FSDP
]


@pytest.mark.parametrize("name", ["current", "block"])
def test_on_every_route(rng, any_mesh, name):
    x, w, c = normal(rng, 128, 1024), normal(rng, 1024, 512), normal(rng, 128, 512)
    a, b = jax.jit(lambda x, w: quantised(name, x, w))(x, w)
    want = c.astype(np.float64) @ in_float64(b).T, in_float64(a).T @ c.astype(np.float64)
    placed = [
        [meshes.place(any_mesh, array, *spec) for array, spec in zip((c, x, w), specs, strict=True)]
        for specs in LAYOUTS_ON_MESHES
    ]

    @jax.jit
    def every(placed):
        return [pulled(product(name), *operands) for operands in placed]

    for got, operands, specs in zip(every(placed), placed, LAYOUTS_ON_MESHES, strict=True):
        for one, other, like in zip(got, want, operands[1:], strict=True):
            assert_shards_close(one, other, reduced=1024, what=str(specs))
            if len({*any_mesh.axis_types}) == 1 and any_mesh.explicit_axes:
                assert meshes.same(one.sharding.spec, like.sharding.spec)


@pytest.mark.parametrize("name", ["current", "block"])
def test_in_shard_map(rng, name):
    """A weight that is the same on all devices: its cotangent is summed over them."""
    x, w, c = normal(rng, 64, 128), normal(rng, 128, 128), normal(rng, 64, 128)
    with meshes.entered("auto", {"dp": 4}) as mesh:

        def local(x, w, c):
            return jax.vjp(product(name), x, w)[1](c)

        f = jax.shard_map(
            local, mesh=mesh, in_specs=(P("dp"), P(), P("dp")), out_specs=(P("dp"), P())
        )
        dx, dw = jax.jit(f)(x, w, c)
    parts = [jax.jit(quantised, static_argnums=0)(name, x[i : i + 16], w) for i in range(0, 64, 16)]
    lhs = np.concatenate([in_float64(a) for a, _ in parts])
    rhs = in_float64(parts[0][1])
    assert_close(dx, c.astype(np.float64) @ rhs.T, reduced=128)
    assert_close(dw, lhs.T @ c.astype(np.float64), reduced=64)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gathers_move_8_bits(kind):
    """FSDP, both passes: data and scales of the weight, never the weight; one reduce-scatter."""
    with meshes.entered(kind, {"dp": 4}) as mesh:
        x = meshes.place(mesh, jnp.ones((2048, 512), jnp.bfloat16), "dp")
        w = meshes.place(mesh, jnp.ones((512, 256), jnp.bfloat16), "dp")
        c = meshes.place(mesh, jnp.ones((2048, 256), jnp.bfloat16), "dp")
        f = jax.jit(lambda c, x, w: jax.vjp(product("block"), x, w)[1](c))
        found = hlo.collectives(f.lower(c, x, w).compile())
    gathers = [c for c in found if c.kind == "all-gather"]
    assert {c.shape for c in gathers} == {(512, 256), (4, 2)}
    # The CPU compiler moves 8-bit floats as 16-bit ones.
    assert {c.dtype for c in gathers if c.shape == (512, 256)} <= {"f8e4m3fn", "f16"}
    assert {c.kind for c in found} <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert sum(c.kind != "all-gather" for c in found) == 1


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_dz_moves_once_for_both_products(kind):
    """Row-parallel with a scattered result: both products of the gradient need all of dz."""
    with meshes.entered(kind, {"tp": 4}) as mesh:
        x = meshes.place(mesh, jnp.ones((512, 1024), jnp.bfloat16), None, "tp")
        w = meshes.place(mesh, jnp.ones((1024, 256), jnp.bfloat16), "tp")
        c = meshes.place(mesh, jnp.ones((512, 256), jnp.bfloat16), "tp")
        f = product("mxfp8", out_sharding=P("tp"))
        pull = jax.jit(lambda c, x, w: jax.vjp(f, x, w)[1](c))
        found = hlo.collectives(pull.lower(c, x, w).compile())
    assert [(c.kind, c.shape) for c in found] == [("all-gather", (512, 256))]


def test_an_optimizer_step_gives_the_same_bits_on_8_devices(rng):
    """Where no sum runs over devices."""
    x, w = normal(rng, 256, 128), normal(rng, 128, 256)

    def step(x, w):
        def loss(w):
            return so.gemm(*quantised("delayed", x, w), out_dtype="bfloat16")

        out, pull = jax.vjp(loss, w)
        return w - 0.1 * pull(out)[0]

    want = jax.jit(step)(x, w)
    with meshes.entered("explicit") as mesh:
        got = jax.jit(step)(meshes.place(mesh, x), meshes.place(mesh, w, None, ("dp", "tp")))
    assert bits(got) == bits(want)
