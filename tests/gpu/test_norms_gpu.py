"""The norms' kernels on a GPU: values and gradients of the public functions against float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.kernels import norm
from tests import references
from tests.closeness import assert_close

LENGTHS = (1, 7, 33, 96, 300, 1000, 1001, 1024, 3000, 4096, 5120, 8192, 12288, 20001, 20480)
LENGTHS += (3001, 32768, 65536, 262144, 262147, 1048576)
ROWS = (1, 3, 130, 700)  # one block, few, more than one a multiprocessor, several turns of a block
EPSILON = 1e-5
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
CASES = [
    pytest.param(turn, cols, dtype, kind, id=f"{kind}-{np.dtype(dtype).name}-{cols}")
    for turn, (cols, dtype, kind) in enumerate(itertools.product(LENGTHS, DTYPES, ("layer", "rms")))
]


def draw(rng: np.random.Generator, shape, dtype):
    return (rng.standard_normal(shape, np.float32) + 0.3).astype(dtype)


@pytest.mark.parametrize("turn, cols, dtype, kind", CASES)
def test_norm_matches_float64(turn, cols, dtype, kind, rng):
    """Options, rows and the parameters' types take turns over the cases."""
    # Three options in eight combinations, on a period that shares no factor with types and kinds.
    add, zero_centered, shifted = (turn * 5 // 6 % 8 >> bit & 1 for bit in range(3))
    rows = ROWS[turn % len(ROWS)] if cols < 20_000 else (3, 140)[turn % 2] if cols < 2**18 else 3
    rows = 21 if cols == 262147 else rows  # more than a block of a resident launch holds
    parameter_dtype = DTYPES[turn // 2 % 3]
    x, dy, residual, dh = (draw(rng, (rows, cols), dtype) for _ in range(4))
    gamma, beta = (draw(rng, cols, parameter_dtype) for _ in range(2))
    options = {"epsilon": EPSILON, "zero_centered_gamma": bool(zero_centered)}
    if kind == "layer":
        run, parameters = so.layer_norm, (gamma, beta) if shifted else (gamma,)
        reference, vjp_reference = (
            references.layer_norm_reference,
            references.layer_norm_vjp_reference,
        )
    else:
        run, parameters = so.rms_norm, (gamma,)
        reference, vjp_reference = references.rms_norm_reference, references.rms_norm_vjp_reference
    if not add:
        residual = dh = None

    def call(x, residual, parameters):
        return run(x, *parameters, add=residual, return_input=bool(add), **options)

    @jax.jit
    def step(x, residual, parameters, cotangents):
        result, pull = jax.vjp(call, x, residual, parameters)
        return result, pull(cotangents)

    got, (dx, dresidual, dparameters) = step(x, residual, parameters, (dy, dh) if add else dy)
    want = reference(x, *parameters, add=residual, **options)
    y = got[0] if add else got
    assert_close(y, want.y, reduced=cols, what="y")
    if add:
        np.testing.assert_array_equal(np.asarray(got[1]).astype(np.float64), want.h)
    cotangents = vjp_reference(dy, x, gamma, add=residual, dh=dh, **options)
    if cols > 1:
        assert_close(dx, cotangents.x, reduced=cols, roundings=2, what="dx")
    else:
        # A difference of equals: rounded as the parts, rstd * dy * gamma, not as what is left.
        part = np.abs(dy.astype(np.float64)).max() * (np.abs(gamma.astype(np.float64)).max() + 1)
        allowed = 1e-6 * part / EPSILON**0.5 + jnp.finfo(dtype).eps * np.abs(cotangents.x).max()
        assert np.abs(np.asarray(dx).astype(np.float64) - cotangents.x).max() <= allowed
    if add:
        np.testing.assert_array_equal(np.asarray(dresidual), np.asarray(dx))
    for name, one, wanted in zip(
        ("gamma", "beta"), dparameters, (cotangents.gamma, cotangents.beta), strict=False
    ):
        if name == "beta" or kind == "rms" or cols > 1:
            assert_close(one, wanted, reduced=rows, what=f"d{name}")


def test_kernel_functions_match_the_reference_on_this_gpu(rng):
    """The custom calls themselves, statistics included, outside any jit."""
    x, gamma = draw(rng, (130, 4096), jnp.bfloat16), draw(rng, 4096, jnp.float32)
    y, mean, rstd = norm.norm_forward(
        x, gamma, None, None, kind="layer", epsilon=1e-6, zero_centered_gamma=False
    )
    wide = x.astype(np.float64)
    assert_close(mean, wide.mean(1), reduced=4096, what="mean")
    assert_close(rstd, 1 / np.sqrt(wide.var(1) + 1e-6), reduced=4096, what="rstd")
    assert_close(y, references.layer_norm_reference(x, gamma).y, reduced=4096, what="y")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [7, 1001, 1000, 3001])
def test_norm_of_a_slice_needs_no_alignment(cols, dtype, rng):
    """A buffer that is a slice of another may start anywhere."""
    x, gamma = draw(rng, (34, cols), dtype), draw(rng, cols, dtype)
    dy = draw(rng, (33, cols), dtype)

    @jax.jit
    def step(x, gamma, dy):
        y, pull = jax.vjp(lambda x, gamma: so.rms_norm(x[1:], gamma), x, gamma)
        return y, *pull(dy)

    y, dx, dgamma = step(x, gamma, dy)
    want = references.rms_norm_vjp_reference(dy, x[1:], gamma)
    assert_close(y, references.rms_norm_reference(x[1:], gamma).y, reduced=cols, what="y")
    assert_close(dx[1:], want.x, reduced=cols, roundings=2, what="dx")
    assert_close(dgamma, want.gamma, reduced=33, what="dgamma")


def test_no_rows_launch_nothing_and_leave_the_device_well():
    x, gamma = jnp.zeros((3, 0, 2520), jnp.bfloat16), jnp.ones(2520, jnp.float32)
    y, pull = jax.vjp(so.rms_norm, x, gamma)
    dx, dgamma = pull(y)
    assert y.shape == dx.shape == x.shape
    assert (dgamma == 0).all()
    assert float(jnp.arange(8.0).sum()) == 28


def test_norm_past_two_to_the_31_elements(rng):
    rows, cols = 2**20 + 8, 2048
    tail = draw(rng, (3, cols), jnp.bfloat16)
    dtail = draw(rng, (3, cols), jnp.bfloat16)  # x itself would leave dx all cancellation
    x, dy = (
        jax.jit(lambda t: jnp.ones((rows, cols), jnp.bfloat16).at[-3:].set(t))(t)
        for t in (tail, dtail)
    )
    gamma = jnp.ones(cols, jnp.bfloat16)

    @jax.jit
    def step(x, dy, gamma):
        y, pull = jax.vjp(so.rms_norm, x, gamma)
        dx, dgamma = pull(dy)
        return y[:1], y[-4:], dx[-4:], dgamma

    first, y, dx, dgamma = step(x, dy, gamma)
    ones = np.ones((1, cols))
    assert_close(first, ones, reduced=cols, what="first row")
    assert_close(y[:1], ones, reduced=cols, what="last row of ones")
    assert_close(y[1:], references.rms_norm_reference(tail, ones[0]).y, reduced=cols, what="tail")
    want = references.rms_norm_vjp_reference(dtail, tail, ones[0])
    assert_close(dx[1:], want.x, reduced=cols, roundings=2, what="dx of the tail")
    assert_close(dgamma, want.gamma + rows - 3, reduced=rows, what="dgamma")


@pytest.mark.parametrize("cols", [1000, 3001, 4096, 65536, 1048576])
def test_repeated_runs_give_the_same_bits(cols, rng):
    """Twenty runs of one executable, so that captured command buffers are replayed too."""
    x, dy = (draw(rng, (700 if cols < 2**20 else 9, cols), jnp.bfloat16) for _ in range(2))
    gamma, beta = (draw(rng, cols, jnp.float32) for _ in range(2))

    @jax.jit
    def step(x, gamma, beta, dy):
        def two_norms(x, gamma, beta):
            y, h = so.layer_norm(x, gamma, beta, add=dy, return_input=True)
            return so.layer_norm(y + h, gamma, beta)

        y, pull = jax.vjp(two_norms, x, gamma, beta)
        return y, *pull(dy)

    first = [np.asarray(result) for result in step(x, gamma, beta, dy)]
    for _ in range(20):
        again = step(x, gamma, beta, dy)
        for one, other in zip(first, again, strict=True):
            assert one.tobytes() == np.asarray(other).tobytes()
