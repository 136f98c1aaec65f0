"""Sums over the mesh of 16-bit numbers in regions that are mapped in part.

XLA on a CPU ends the process there where a psum is of bfloat16, in plain JAX too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes
from tests.closeness import assert_shards_close

M, K, N = 16, 64, 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["explicit-auto", "auto-explicit"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_partial_sums_of_16_bits_on_a_mixed_mesh(rng, dtype, kind, axis):
    x, w = (rng.standard_normal(s).astype(dtype) for s in ((M, K), (K, N)))
    want = x.astype(np.float64) @ w.astype(np.float64)
    with meshes.entered(kind) as mesh:
        placed = meshes.place(mesh, x, None, axis), meshes.place(mesh, w, axis)
        for out in (P(), P(axis)):
            f = jax.jit(lambda x, w, out=out: so.gemm(x, w, out_sharding=out))
            assert_shards_close(f(*placed), want, reduced=K, roundings=8)

        def loss(w, x):
            return jnp.sum(so.gemm(x, w).astype(jnp.float32))

        rows = meshes.place(mesh, x, axis), meshes.place(mesh, w)
        slope = jax.jit(jax.grad(loss))(rows[1], rows[0])
        want_slope = np.broadcast_to(x.astype(np.float64).sum(0)[:, None], (K, N))
        assert_shards_close(slope, want_slope, reduced=M, roundings=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gradients_of_16_bits_in_a_partly_manual_region(rng, kind, dtype):
    """The weight is the same along the manual axis: its gradient is summed over that."""
    x, w = (rng.standard_normal(s).astype(dtype) for s in ((M, K), (K, N)))
    with meshes.entered(kind) as mesh:
        f = jax.shard_map(so.gemm, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"})
        placed = meshes.place(mesh, x, "dp"), meshes.place(mesh, w)
        loss = lambda x, w: jnp.sum(f(x, w).astype(jnp.float32))  # noqa: E731
        slope = jax.jit(jax.grad(loss, 1))(*placed)
    want = np.broadcast_to(x.astype(np.float64).sum(0)[:, None], (K, N))
    assert_shards_close(slope, want, reduced=M, roundings=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_partial_sums_of_16_bits_in_a_partly_manual_region(rng, dtype):
    x, w = (rng.standard_normal(s).astype(dtype) for s in ((M, K), (K, N)))
    want = x.astype(np.float64) @ w.astype(np.float64)
    with meshes.entered("auto") as mesh:
        f = jax.shard_map(so.gemm, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"})
        placed = meshes.place(mesh, x, "dp", "tp"), meshes.place(mesh, w, "tp")
        assert_shards_close(jax.jit(f)(*placed), want, reduced=K, roundings=8)
