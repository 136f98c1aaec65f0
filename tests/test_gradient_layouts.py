"""Gradients of a product in every layout of its operands and its result: all plan, some are run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from tests.closeness import assert_close

ROWS, COLUMNS = (8, 8, 16), (16, 16)
AXES = (None, "dp", "tp", ("dp", "tp"), ("tp", "dp"))


def specs(rank: int) -> list[P]:
    """Every layout that uses an axis once at most."""
    found = []
    for dims in itertools.product(AXES, repeat=rank):
        used = [a for d in dims if d for a in ((d,) if isinstance(d, str) else d)]
        if len(used) == len(set(used)):
            found.append(P(*dims))
    return found


def gradient(mesh, out: P):
    def loss(x, w, c):
        return jnp.sum(so.gemm(x, w, out_sharding=out) * c)

    return jax.grad(loss, (0, 1))


@pytest.fixture
def mesh():
    made = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(made):
        yield made


def placed(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def cases() -> list[tuple[P, P, P]]:
    """Of each pair of layouts of x and the result one of w, in turn."""
    pairs = list(itertools.product(specs(3), specs(3)))
    weights = specs(2)
    return [(x, weights[n * 5 % len(weights)], out) for n, (x, out) in enumerate(pairs)]


def test_every_gradient_is_planned(mesh):
    """Traced: planned and carried out on types, not run."""
    every = cases()
    for x, w, out in every:
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in ((ROWS, x), (COLUMNS, w), (ROWS, out))
        ]
        dx, dw = jax.eval_shape(gradient(mesh, out), *shapes)
        assert (dx.shape, dw.shape) == (ROWS, COLUMNS), (x, w, out)
    assert len(every) > 300


# The second product starts from where the first one's moves take parts of axes.
PARTS = [
    (P("dp"), P(), P(None, None, ("dp", "tp"))),
    (P("dp"), P(None, "tp"), P(None, None, ("dp", "tp"))),
    (P(None, "dp"), P("tp"), P(None, None, ("dp", "tp"))),
]


def test_gradients_are_right(mesh, rng):
    chosen = PARTS + cases()[7::331]
    x, c = (rng.standard_normal(ROWS, np.float32) for _ in range(2))
    w = rng.standard_normal(COLUMNS, np.float32)
    arrays = [
        (placed(mesh, x, at_x), placed(mesh, w, at_w), placed(mesh, c, out))
        for at_x, at_w, out in chosen
    ]
    run = jax.jit(
        lambda arrays: [
            gradient(mesh, out)(*a) for a, (_, _, out) in zip(arrays, chosen, strict=True)
        ]
    )
    wide = [a.astype(np.float64) for a in (x, w, c)]
    want = wide[2] @ wide[1].T, np.einsum("bsk,bsn->kn", wide[0], wide[2])
    for layout, got in zip(chosen, run(arrays), strict=True):
        for name, one, wanted in zip(("dx", "dw"), got, want, strict=True):
            assert_close(one, wanted, reduced=64, what=f"{name} of {layout}")
