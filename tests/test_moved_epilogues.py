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
