"""Collectives that docstrings promise beside the layouts with names."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import meshes
from tests.moved import DP, TP, B, K, N, S, size


def summary(f, *arrays):
    return hlo.summary(jax.jit(f).lower(*arrays).compile())


def test_bias_gradient_is_scattered_where_the_bias_is_sharded_like_the_rows(explicit_mesh):
    dy = meshes.place(explicit_mesh, jnp.ones((B, S, N)), "dp")
    x = meshes.place(explicit_mesh, jnp.ones((B, S, K)), "dp")
    w = meshes.place(explicit_mesh, jnp.ones((K, N)))
    bias = meshes.place(explicit_mesh, jnp.ones(N), "dp")

    def gradient(bias, dy):
        return jax.vjp(lambda bias: so.gemm(x, w, bias=bias), bias)[1](dy)

    assert summary(gradient, bias, dy) == {"reduce-scatter": (1, size(N // DP))}


def test_add_comes_after_the_sum_and_moves_nothing(mesh):
    x = meshes.place(mesh, jnp.ones((B, S, K)), "dp", None, "tp")
    w = meshes.place(mesh, jnp.ones((K, N)), "tp")
    add = meshes.place(mesh, jnp.ones((B, S, N)), "dp")
    f = jax.jit(lambda x, w, add: so.gemm(x, w, add=add, out_sharding=P("dp")))
    assert summary(f, x, w, add) == {"all-reduce": (1, size(B // DP, S, N))}
    np.testing.assert_array_equal(np.asarray(f(x, w, add)), K + 1)


def test_axis_on_one_operands_contracting_dim_gathers_that_operand(explicit_mesh):
    """Where the result is much larger than the operand; else the result would be summed."""
    x = meshes.place(explicit_mesh, jnp.ones((B, S, K)), "dp", None, "tp")
    w = meshes.place(explicit_mesh, jnp.ones((K, 4 * N)))
    assert summary(so.gemm, x, w) == {"all-gather": (1, size(B // DP, S, K))}


def test_axis_on_contracting_dims_that_are_not_paired_moves_as_planned(explicit_mesh):
    """Gathering both would do, and moves four times as much."""
    specs = ("tp",), (None, "tp")
    x = meshes.place(explicit_mesh, jnp.ones((8, 16, 4)), *specs[0])
    w = meshes.place(explicit_mesh, jnp.ones((8, 16, 4)), *specs[1])
    contracting = ((0, 1), (0, 1))

    def f(x, w):
        return so.gemm(x, w, contracting_dims=contracting)

    found = hlo.collectives(jax.jit(f).lower(x, w).compile())
    received = sum(map(hlo.received_bytes, found))
    planned = so.rules.plan_gemm(
        x.shape,
        w.shape,
        *specs,
        {"dp": DP, "tp": TP},
        contracting_dims=contracting,
        itemsizes=(4, 4, 4),
    )
    assert received == planned.bytes <= 2 * size(8, 16, 4) * (TP - 1) / TP / 4
