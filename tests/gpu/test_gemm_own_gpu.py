"""Products that a kernel of this library makes, on the GPU, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.kernels import gemm_flat, gemm_small
from tests.closeness import assert_close
from tests.kernels.flat_products import DTYPES, TURNS, draw

# Rows and columns: one tile, a few, several a block; no multiples of one.
SIZES = ((8, 72), (200, 136), (72, 5000), (4504, 264), (1912, 2056), (3000, 4104))
# Rows and columns of small products.
SMALL = ((8, 8), (72, 40), (128, 128), (248, 240), (1000, 64))


@pytest.fixture
def of_any_size(monkeypatch):
    """The kernel makes products of any size that it can make."""
    monkeypatch.setattr(gemm_flat, "_LEAST", {gemm_flat.LONGEST: (1, 1)})


def compiled(turns, lhs, rhs, kernel="gemm_flat"):
    dims = ((0 if turns[0] else 1,), (1 if turns[1] else 0,))
    lowered = jax.jit(lambda lhs, rhs: so.gemm(lhs, rhs, contracting_dims=dims)).lower(lhs, rhs)
    assert kernel in lowered.as_text()
    return lowered.compile()


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turns", TURNS)
def test_values(turns, dtype):
    """Drawn contractions of all depths; the same bits each time."""
    rng = np.random.default_rng([TURNS.index(turns), len(dtype)])
    for m, n in SIZES:
        drawn = draw(rng, m, n, 8 * int(rng.integers(1, 9)), dtype, *turns)
        lhs, rhs = jnp.asarray(drawn.lhs), jnp.asarray(drawn.rhs)
        run = compiled(turns, lhs, rhs)
        got = run(lhs, rhs)
        assert_close(got, drawn.want, reduced=drawn.problem.k, what=f"{drawn.problem}")
        assert np.array_equal(got, run(lhs, rhs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turns", TURNS)
def test_values_of_small_products(turns, dtype):
    """Contractions of all lengths; the same bits each time."""
    rng = np.random.default_rng([TURNS.index(turns), len(dtype)])
    for m, n in SMALL:
        k = 8 * int(rng.integers(1, gemm_small.LONGEST // 8 + 1))
        drawn = draw(rng, m, n, k, dtype, *turns)
        lhs, rhs = jnp.asarray(drawn.lhs), jnp.asarray(drawn.rhs)
        run = compiled(turns, lhs, rhs, "gemm_small")
        got = run(lhs, rhs)
        assert_close(got, drawn.want, reduced=k, what=f"{drawn.problem}")
        assert np.array_equal(got, run(lhs, rhs))


def test_a_chain_of_small_products(rng):
    """Each starts before the one that it reads the result of has ended, and waits for it."""
    x = jnp.asarray(rng.standard_normal((128, 128)), jnp.bfloat16)
    turn = jnp.asarray(np.linalg.qr(rng.standard_normal((128, 128)))[0], jnp.bfloat16)

    @jax.jit
    def chain(x, turn):
        for _ in range(20):
            x = so.gemm(x, turn)
        return x

    assert "gemm_small" in chain.lower(x, turn).as_text()
    start, step = (np.asarray(v).astype(np.float64) for v in (x, turn))
    want = start @ np.linalg.matrix_power(step, 20)
    for _ in range(3):
        assert_close(chain(x, turn), want, reduced=128, roundings=20)


@pytest.mark.usefixtures("of_any_size")
def test_infinities_and_nan_stay_in_their_rows_and_columns():
    m, n, k = 2048, 2056, 24
    lhs, rhs = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    lhs[5, 3], lhs[130, 23], rhs[0, 2050] = np.nan, np.inf, -np.inf
    operands = jnp.bfloat16(lhs), jnp.bfloat16(rhs)
    got = np.asarray(compiled(TURNS[0], *operands)(*operands), np.float32)
    np.testing.assert_array_equal(got, lhs @ rhs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype, rng):
    """LoRA: what comes of a low rank, of a size that the kernel gains at, and what goes back."""
    x, down, up = (
        jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, dtype)
        for shape in ((4096, 1024), (1024, 16), (16, 4096))
    )
    weight = jnp.asarray(rng.standard_normal((4096, 4096)), dtype)

    def loss(x, down, up):
        return jnp.sum(so.gemm(so.gemm(x, down), up).astype(jnp.float32) * weight)

    assert jax.jit(loss).lower(x, down, up).as_text().count('"gemm_flat"') == 1
    got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, down, up)
    x, down, up, weight = (np.asarray(a).astype(np.float64) for a in (x, down, up, weight))
    hidden = weight @ up.T
    want = (hidden @ down.T, x.T @ hidden, (x @ down).T @ weight)
    for value, expected in zip(got, want, strict=True):
        assert_close(value, expected, reduced=4096, roundings=3)


@pytest.mark.usefixtures("of_any_size")
def test_in_a_loop_whose_launches_are_captured(rng):
    x = jnp.asarray(rng.standard_normal((2048, 64)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((64, 2048)), jnp.bfloat16)

    @jax.jit
    def run(x, w):
        def step(total, scale):
            return total + so.gemm(x * scale, w).astype(jnp.float32), None

        total, _ = jax.lax.scan(step, jnp.zeros((2048, 2048)), jnp.bfloat16([1, 2, 4]))
        return total

    want = 7 * (np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64))
    for _ in range(3):
        assert_close(run(x, w), want, reduced=64, dtype=jnp.bfloat16, roundings=3)
