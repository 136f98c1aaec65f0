"""Inside shard_map, fully and partly manual, with check_vma on and off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import calls, cases, meshes
from tests.closeness import assert_shards_close

vma = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
both_norms = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])

MLP = cases.GemmCase("", (8, 16, 32), (32, 64))


def _check_gemm(f, rng, placed=lambda name, a: a, **extra):
    arrays = calls.gemm_arrays(MLP, rng, "float32")
    cotangent = cases.random(rng, (8, 16, 64))
    wanted = calls.gemm_wanted(MLP, arrays, cotangent)
    arrays = {n: placed(n, a) for n, a in arrays.items()}
    got, gradients = calls.value_and_gradients(f, arrays, (cotangent,))
    calls.check_gemm(MLP, got, gradients, wanted, assert_shards_close)


@vma
def test_gemm_fully_manual(rng, mesh, check_vma):
    """rhs is the same over dp: its gradient is summed over dp."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("dp", None, "tp"), P("tp")),
        out_specs=P("dp"),
        check_vma=check_vma,
    )
    def f(lhs, rhs):
        return jax.lax.psum(so.gemm(lhs, rhs, batch_dims=((0,), ())), "tp")

    def placed(name, array):
        return meshes.place(mesh, array, *(("dp", None, "tp") if name == "lhs" else ("tp",)))

    _check_gemm(lambda lhs, rhs: f(lhs, rhs), rng, placed)


@vma
@pytest.mark.parametrize("manual", ["dp", "tp"])
def test_gemm_partly_manual(rng, auto_mesh, manual, check_vma):
    """The other axis stays Auto, and the op partitions itself over it."""
    row = ("dp", None, "tp"), ("tp",)
    specs = [meshes.only(s, manual) for s in (*row, ("dp",))]

    @functools.partial(
        jax.shard_map,
        mesh=auto_mesh,
        in_specs=tuple(specs[:2]),
        out_specs=specs[2],
        axis_names={manual},
        check_vma=check_vma,
    )
    def f(lhs, rhs):
        out = so.gemm(lhs, rhs)
        return jax.lax.psum(out, "tp") if manual == "tp" else out

    def placed(name, array):
        return meshes.place(auto_mesh, array, *row[name != "lhs"])

    _check_gemm(lambda lhs, rhs: f(lhs, rhs), rng, placed)


@vma
@pytest.mark.parametrize("manual", ["dp", "tp"])
def test_gemm_partly_manual_beside_explicit(rng, explicit_mesh, manual, check_vma):
    row = ("dp", None, "tp"), ("tp",)
    specs = [meshes.only(s, manual) for s in (*row, ("dp",))]
    out = P("dp") if manual == "tp" else None

    @functools.partial(
        jax.shard_map,
        in_specs=tuple(specs[:2]),
        out_specs=specs[2],
        axis_names={manual},
        check_vma=check_vma,
    )
    def f(lhs, rhs):
        result = so.gemm(lhs, rhs, out_sharding=out)
        return jax.lax.psum(result, "tp") if manual == "tp" else result

    def placed(name, array):
        return meshes.place(explicit_mesh, array, *row[name != "lhs"])

    _check_gemm(lambda lhs, rhs: f(lhs, rhs), rng, placed)


def test_gemm_gradient_inside_sums_a_replicated_weight(rng, mesh):
    """With vma the gradient of a weight that is the same on all devices is their sum."""
    x, w = cases.random(rng, (8, 32)), cases.random(rng, (32, 64))
    c = cases.random(rng, (8, 64))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("dp"), P(), P("dp")), out_specs=P())
    def inside(x, w, c):
        return jax.grad(lambda w: jax.lax.psum(jnp.sum(so.gemm(x, w) * c), "dp"))(w)

    got = jax.jit(inside)(
        meshes.place(mesh, x, "dp"), meshes.place(mesh, w), meshes.place(mesh, c, "dp")
    )
    assert_shards_close(got, x.T.astype(np.float64) @ c, reduced=8)


def test_gemm_gradient_inside_is_local_without_vma(rng, mesh):
    """Without vma it is each device's share, for the user to sum."""
    x, w = cases.random(rng, (8, 32)), cases.random(rng, (32, 64))
    c = cases.random(rng, (8, 64))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("dp"), P(), P("dp")),
        out_specs=P("dp"),
        check_vma=False,
    )
    def inside(x, w, c):
        return jax.grad(lambda w: jnp.sum(so.gemm(x, w) * c))(w)[None]

    got = jax.jit(inside)(
        meshes.place(mesh, x, "dp"), meshes.place(mesh, w), meshes.place(mesh, c, "dp")
    )
    want = np.einsum("dbk,dbn->dkn", x.reshape(2, 4, 32).astype(np.float64), c.reshape(2, 4, 64))
    assert_shards_close(got, want, reduced=4)


@vma
def test_gemm_bias_is_added_once_where_replicated(rng, mesh, check_vma):
    case = cases.GemmCase("", (8, 32), (32, 64), bias=True, activation="gelu")
    arrays = calls.gemm_arrays(case, rng, "float32")
    cotangent = cases.random(rng, (8, 64))
    wanted = calls.gemm_wanted(case, arrays, cotangent)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("dp"), P(None, "tp"), P("tp")),
        out_specs=P("dp", "tp"),
        check_vma=check_vma,
    )
    def f(lhs, rhs, bias):
        return so.gemm(lhs, rhs, bias=bias, activation="gelu")

    specs = {"lhs": ("dp",), "rhs": (None, "tp"), "bias": ("tp",)}
    placed = {n: meshes.place(mesh, a, *specs[n]) for n, a in arrays.items()}
    got, gradients = calls.value_and_gradients(
        lambda lhs, rhs, bias: f(lhs, rhs, bias), placed, (meshes.place(mesh, cotangent),)
    )
    calls.check_gemm(case, got, gradients, wanted, assert_shards_close)


NORM = cases.NormCase("", (8, 16, 32), add=True, return_input=True, beta=True)


def _check_norm(op, f, rng, mesh):
    arrays, cotangents = calls.norm_arrays(op, NORM, rng, "float32")
    wanted = calls.norm_wanted(op, NORM, arrays, cotangents)
    placed = {
        n: meshes.place(mesh, a, *(("dp", "tp") if n in ("x", "add") else ()))
        for n, a in arrays.items()
    }
    got, gradients = calls.value_and_gradients(
        f, placed, tuple(meshes.place(mesh, c) for c in cotangents)
    )
    calls.check_norm(NORM, got, gradients, wanted, assert_shards_close)


@vma
@both_norms
@pytest.mark.parametrize("manual", [("dp", "tp"), ("dp",), ("tp",)], ids="+".join)
def test_norm_manual(rng, mesh, op, manual, check_vma):
    """gamma and beta are the same everywhere: their gradients are summed over every manual axis."""
    rows = meshes.only(("dp", "tp"), *manual)

    def f(**arrays):
        mapped = jax.shard_map(
            lambda arrays: calls.norm(op, NORM)(**arrays),
            mesh=mesh,
            in_specs=({n: rows if n in ("x", "add") else P() for n in arrays},),
            out_specs=(rows, rows),
            axis_names=set(manual),
            check_vma=check_vma,
        )
        return mapped(arrays)

    _check_norm(op, f, rng, mesh)


@both_norms
def test_norm_gradient_inside_sums_replicated_parameters(rng, mesh, op):
    x, gamma = cases.random(rng, (8, 16, 32)), cases.random(rng, (32,))
    dy = cases.random(rng, x.shape)
    case = cases.NormCase("", x.shape)
    rows = P("dp", "tp")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, P(), rows), out_specs=P())
    def inside(x, gamma, dy):
        def loss(gamma):
            return jax.lax.psum(jnp.sum(getattr(so, op)(x, gamma) * dy), ("dp", "tp"))

        return jax.grad(loss)(gamma)

    got = jax.jit(inside)(
        meshes.place(mesh, x, *rows), meshes.place(mesh, gamma), meshes.place(mesh, dy, *rows)
    )
    _, wanted = calls.norm_wanted(op, case, {"x": x, "gamma": gamma}, (dy,))
    assert_shards_close(got, wanted.gamma, reduced=case.rows + 32)
