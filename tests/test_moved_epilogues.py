"""Products whose result goes on after the last sum: their epilogues are right and move nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import shardops as so
from shardops import array_type, hlo
from shardops.rules.spec import to_spec
from tests import meshes

ROWS, DIM = 32, 64
# name: what a result costs; wanted of the result; specs of x, w, bias, `add`
LAYOUTS = {
    "gathered": ({"all-gather": 1}, P(None, None), ("dp",), (), (), ("dp",)),
    "gathered, all that is added whole": ({"all-gather": 1}, P(None, None), ("dp",), (), (), ()),
    "exchanged": ({"all-to-all": 1}, P(None, "tp"), ("tp",), (), (), ("tp",)),
    "exchanged, what is added lies as the result": (
        {"all-to-all": 1},
        P(None, "tp"),
        ("tp",),
        (),
        ("tp",),
        (None, "tp"),
    ),
    "summed and gathered": (
        {"all-reduce": 1, "all-gather": 1},
        P(None, None),
        ("dp", "tp"),
        ("tp",),
        (),
        ("dp",),
    ),
}


def products(wanted, activation):
    """The product with its epilogue, and with bias, `add` and activation of jnp."""

    def fused(x, w, bias, add):
        return so.gemm(x, w, bias=bias, add=add, activation=activation, out_sharding=wanted)

    def apart(x, w, bias, add):
        z = so.gemm(x, w, out_sharding=wanted) + bias + array_type.laid_out(add, to_spec(wanted, 2))
        return getattr(jax.nn, activation)(z) if activation else z

    return fused, apart


def in_jnp(activation, x, w, bias, add):
    z = x @ w + bias + add
    return getattr(jax.nn, activation)(z) if activation else z


def gradients(f, cotangent):
    return jax.grad(lambda *args: jnp.sum(f(*args) * cotangent), (0, 1, 2, 3))


@pytest.fixture
def operands(mesh, rng, request):
    moves, wanted, *specs = LAYOUTS[request.param]
    shapes = ((ROWS, DIM), (DIM, DIM), (DIM,), (ROWS, DIM))
    host = [rng.standard_normal(s) / s[0] ** 0.5 for s in shapes]
    cotangent = rng.standard_normal((ROWS, DIM))
    arrays = [
        meshes.place(mesh, np.float32(a), *spec, *(None,) * (a.ndim - len(spec)))
        for a, spec in zip(host, specs, strict=True)
    ]
    return (
        moves,
        wanted,
        arrays,
        host,
        cotangent,
        meshes.place(mesh, np.float32(cotangent), *wanted),
    )


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("operands", LAYOUTS, indirect=True)
def test_moved_epilogues(operands, activation) -> None:
    """Values and gradients against float64; no kind of collective more, no byte more than apart."""
    moves, wanted, arrays, host, cotangent, placed = operands
    fused, apart = products(wanted, activation)
    both, others = (
        [jax.jit(p).lower(*arrays).compile() for p in (f, gradients(f, placed))]
        for f in (fused, apart)
    )
    assert {k: n for k, (n, _) in hlo.summary(both[0]).items()} == moves
    for got, most in zip(map(hlo.summary, both), map(hlo.summary, others), strict=True):
        assert {*got} <= {*most}
        assert all(n <= most[k][0] and size <= most[k][1] for k, (n, size) in got.items())
    with jax.enable_x64(True):
        exact = [jnp.asarray(a, jnp.float64) for a in host]
        reference = partial(in_jnp, activation)
        want = [reference(*exact), *gradients(reference, jnp.asarray(cotangent))(*exact)]
    out, cotangents = (program(*arrays) for program in both)
    for g, w in zip([out, *cotangents], want, strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-4, atol=1e-5)


def received(program) -> float:
    return sum(map(hlo.received_bytes, hlo.collectives(program)))


def test_an_added_array_is_met_on_the_way(mesh, rng) -> None:
    """The product is made where `add` lies, takes it in, and is gathered: `add` does not move."""
    host = [np.float32(rng.standard_normal(s)) for s in ((48, 32), (32, 48), (48, 48))]
    specs = ((None, "tp"), (None, None), ("tp", None))
    x, w, add = (meshes.place(mesh, a, *spec) for a, spec in zip(host, specs, strict=True))
    f = lambda x, w, add: so.gemm(x, w, add=add, out_sharding=P(None, None))  # noqa: E731
    program = jax.jit(f).lower(x, w, add).compile()
    np.testing.assert_allclose(program(x, w, add), host[0] @ host[1] + host[2], atol=1e-4)
    # x exchanged, and the result gathered. Gathers of x and of `add` would be 11520.
    assert received(program) == 4 * 48 * 32 / 4 * 3 / 4 + 4 * 48 * 48 * 3 / 4


def test_a_result_that_moves_unsummed_moves_in_its_own_dtype(explicit_mesh, rng) -> None:
    """`precise_accumulation` widens sums alone."""
    x = meshes.place(explicit_mesh, jnp.ones((ROWS, DIM), jnp.bfloat16), "tp", None)
    w = meshes.place(explicit_mesh, jnp.ones((DIM, DIM), jnp.bfloat16), None, None)
    add = meshes.place(explicit_mesh, jnp.ones((ROWS, DIM), jnp.bfloat16), None, "tp")
    f = partial(so.gemm, out_sharding=P(None, "tp"), precise_accumulation=True)
    text = jax.jit(lambda x, w, add: f(x, w, add=add)).lower(x, w, add).as_text()
    [line] = [line for line in text.splitlines() if "all_to_all" in line]
    assert "bf16" in line
    assert "f32" not in line


def test_a_bias_does_not_shard_the_product(auto_mesh, rng) -> None:
    x = meshes.place(auto_mesh, np.ones((ROWS, DIM), np.float32), "dp", None)
    w, bias = (meshes.place(auto_mesh, np.ones(s, np.float32), *spec) for s, spec in (
        ((DIM, DIM), (None, None)), ((DIM,), ("tp",))))  # fmt: skip
    program = jax.jit(lambda x, w, b: so.gemm(x, w, bias=b)).lower(x, w, bias).compile()
    assert hlo.summary(program) == {"all-gather": (1, 4 * DIM)}


def test_a_quantised_product_whose_result_moves(mesh, rng) -> None:
    host = np.float32(rng.standard_normal((ROWS, DIM)))
    x = so.quantize(meshes.place(mesh, host, "tp", None), so.recipes.CurrentScaling().quantizer())
    w, bias, add = (np.float32(rng.standard_normal(s)) for s in ((DIM, DIM), (DIM,), (ROWS, DIM)))
    got = so.gemm(
        x,
        meshes.place(mesh, w, None, None),
        bias=meshes.place(mesh, bias, None),
        add=meshes.place(mesh, add, "tp", None),
        out_sharding=P(None, None),
    )
    want = np.asarray(x.dequantize(), np.float64) @ w + bias + add
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bias_axis", ["dp", "tp"])
@pytest.mark.parametrize("wanted", [None, P("dp", None), P(None, "tp")], ids=str)
def test_vmap_over_a_bias_or_an_added_array(mesh, rng, bias_axis, wanted) -> None:
    """Terms that lie otherwise than the product are laid out as it is."""
    x, w, bias, add = (
        np.float32(rng.standard_normal(s)) for s in ((3, 16, 8), (8, 16), (3, 16), (3, 16, 16))
    )
    placed = (
        meshes.place(mesh, x, None, "dp", None),
        meshes.place(mesh, bias, None, bias_axis),
        meshes.place(mesh, add, None, "tp", None),
    )
    at = meshes.place(mesh, w, None, None)

    @jax.jit
    def f(x, bias, add):
        one = lambda x, b, a: so.gemm(x, at, bias=b, add=a, out_sharding=wanted)  # noqa: E731
        return jax.vmap(one)(x, bias, add)

    want = np.einsum("bmk,kn->bmn", x, w) + bias[:, None] + add
    np.testing.assert_allclose(f(*placed), want, rtol=1e-4, atol=1e-4)
