"""Eager calls of gemm: one program each, found again, and checked like any other call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes


@pytest.fixture
def operands(rng):
    return tuple(jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(2))


def compiles(function, caplog) -> int:
    """How many programs a call compiles."""
    with caplog.at_level("WARNING", logger="jax"), jax.log_compiles(True):
        caplog.clear()
        function()
    return sum("Finished XLA compilation" in record.message for record in caplog.records)


def test_an_eager_call_compiles_one_program_once(operands, caplog):
    x, w = operands
    shape = (5, 8)  # of no other test
    x = x[:5]

    def call():
        out = so.gemm(x, w, bias=w[0], activation="silu", out_dtype="bfloat16")
        assert out.shape == shape

    call()  # w[0] compiles too
    jax.clear_caches()
    w[0].block_until_ready()
    assert compiles(call, caplog) == 1
    assert compiles(call, caplog) == 0


def test_wrong_calls_are_refused_after_right_ones(operands):
    """Statics that are equal to right ones, and wrong."""
    x, w = operands
    for _ in range(2):
        so.gemm(x, w, contracting_dims=((1,), (0,)))
        with pytest.raises(TypeError, match="contracting_dims"):
            so.gemm(x, w, contracting_dims=((True,), (False,)))
        with pytest.raises(TypeError, match="contracting_dims"):
            so.gemm(x, w, contracting_dims=((1.0,), (0,)))
        with pytest.raises(TypeError, match="contracting_dims"):
            so.gemm(x, w, contracting_dims=3)
        so.gemm(x, w, precise_accumulation=True)
        with pytest.raises(TypeError, match="precise_accumulation"):
            so.gemm(x, w, precise_accumulation=1)
        with pytest.raises(ValueError, match="activation"):
            so.gemm(x, w, activation="tanh")
        with pytest.raises(ValueError, match="activation"):
            so.gemm(x, w, activation=["gelu"])


def test_statics_that_cannot_be_looked_up(operands):
    x, w = operands
    want = np.asarray(x).T @ np.asarray(w)
    for dims in ([[0], [0]], ([0], (0,)), ((np.int64(0),), (np.int64(0),))):
        np.testing.assert_allclose(so.gemm(x, w, contracting_dims=dims), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(so.gemm(np.asarray(x), w), x @ w, rtol=1e-5, atol=1e-5)


def test_contexts_count_in_eager_calls(operands):
    x, w = operands
    plain = so.gemm(x, w)
    with so.use_kernels(""):
        np.testing.assert_array_equal(so.gemm(x, w), plain)
    with jax.disable_jit():
        np.testing.assert_array_equal(so.gemm(x, w), plain)
    grads = [jax.grad(lambda x: so.gemm(x, w, activation="relu").sum())(x) for _ in range(2)]
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_eager_calls_on_a_mesh(rng, kind):
    with meshes.entered(kind) as mesh:
        x = meshes.place(mesh, jnp.asarray(rng.standard_normal((8, 16)), jnp.float32), None, "tp")
        w = meshes.place(mesh, jnp.asarray(rng.standard_normal((16, 8)), jnp.float32), "tp", None)
        for spec in (P("dp", None), P(None, "tp")):
            out = so.gemm(x, w, out_sharding=spec)
            assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)
            np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(w), rtol=1e-4, atol=1e-4)
