"""Layouts and settings that neighbouring libraries were reported to fail on: each as its kind.

Values on every device against float64, and what moves.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import cases, meshes, received, references
from tests.closeness import assert_close, assert_shards_close


def compiled(f, *arrays, out=None):
    """Of f with its result wanted in `out`, as either kind of mesh is told it."""
    return jax.jit(f, **({} if out is None else {"out_shardings": out})).lower(*arrays).compile()


# --- gradients of data-parallel weights, FSDP weights ---------------------------------------------


def test_data_parallel_weight_gradient_gathers_nothing(rng, mesh):
    """x and dy lie over dp: a local product and one all-reduce of the weight's size."""
    x, dy = cases.random(rng, (8, 4, 16)), cases.random(rng, (8, 4, 24))

    def f(x, dy):
        return so.gemm(x, dy, contracting_dims=((0, 1), (0, 1)), batch_dims=((0, 1), (0, 1)))

    placed = meshes.place(mesh, x, "dp"), meshes.place(mesh, dy, "dp")
    program = compiled(f, *placed, out=NamedSharding(mesh, P()))
    assert hlo.summary(program) == {"all-reduce": (1, 4 * 16 * 24)}
    want = np.einsum("bsk,bsn->kn", x.astype(np.float64), dy)
    assert_shards_close(program(*placed), want, reduced=32)


def test_fsdp_weight_alone_is_gathered(rng, mesh):
    """The weight lies over the axis of the batch: it moves, and x does not."""
    x, w = cases.random(rng, (64, 8, 16)), cases.random(rng, (16, 24))
    placed = meshes.place(mesh, x, "dp"), meshes.place(mesh, w, None, "dp")
    f = functools.partial(so.gemm, batch_dims=((0,), ()))
    program = compiled(f, *placed, out=NamedSharding(mesh, P("dp")))
    assert hlo.summary(program) == {"all-gather": (1, 4 * 16 * 24)}
    assert_shards_close(program(*placed), x.astype(np.float64) @ w, reduced=16)


# --- several contracting dims ---------------------------------------------------------------------

TWO = ((0, 1), (0, 1))


def test_one_axis_on_two_contracting_dims_that_are_no_pair(rng, mesh):
    """lhs has it on the first one, rhs on the second: the sum of both as they lie is wrong."""
    lhs, rhs = cases.random(rng, (8, 4, 16)), cases.random(rng, (8, 4, 24))
    placed = meshes.place(mesh, lhs, "tp"), meshes.place(mesh, rhs, None, "tp")
    f = functools.partial(so.gemm, contracting_dims=TWO)
    program = compiled(f, *placed, out=NamedSharding(mesh, P()))
    want = np.einsum("abk,abn->kn", lhs.astype(np.float64), rhs)
    assert_shards_close(program(*placed), want, reduced=32)
    assert received.received(program) <= plain_bytes(placed)


def plain_bytes(arrays):
    """What lax.dot_general moves on the same mesh with Auto axes: it refuses some on Explicit."""
    auto = meshes.make("auto")
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(auto, a.sharding.spec))
        for a in arrays
    ]
    with jax.set_mesh(auto):
        plain = compiled(
            lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, (TWO, ((), ()))),
            *types,
            out=NamedSharding(auto, P()),
        )
    return received.received_at_best(plain)


def test_two_contracting_dims_that_are_both_sharded_make_one_sum(rng, mesh):
    lhs, rhs = cases.random(rng, (16, 32, 8)), cases.random(rng, (16, 32, 12))
    placed = meshes.place(mesh, lhs, "dp", "tp"), meshes.place(mesh, rhs, "dp", "tp")
    f = functools.partial(so.gemm, contracting_dims=TWO)
    program = compiled(f, *placed, out=NamedSharding(mesh, P()))
    [only] = hlo.collectives(program)
    assert (only.kind, only.groups, only.bytes) == ("all-reduce", 8, 4 * 8 * 12)
    want = np.einsum("abk,abn->kn", lhs.astype(np.float64), rhs)
    assert_shards_close(program(*placed), want, reduced=512)


# --- inside shard_map, scan and jit ---------------------------------------------------------------


@pytest.mark.parametrize("manual", [("dp",), ("tp",), ("dp", "tp")], ids="+".join)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_layers_in_a_scan_inside_a_shard_map(rng, mesh, manual, wrap):
    """Three layers with weights of their own, nested jits, all or some axes mapped."""
    x, w = cases.random(rng, (8, 16)), cases.random(rng, (3, 16, 16), scale=0.25)
    columns = P(None, None, "tp")
    # The carry of a scan keeps its type: where tp is in it, the result is wanted whole.
    whole = P() if meshes.explicit_axes(mesh) and "tp" not in manual else None

    def layers(x, w):
        def layer(x, w):
            y = jax.jit(functools.partial(so.gemm, out_sharding=whole))(x, w)
            if "tp" in manual:
                y = jax.lax.all_gather(y, "tp", axis=1, tiled=True)
                x = jax.lax.pcast(x, "tp", to="varying") if varies(x, y) else x
            return x + y, None

        start = jax.lax.pcast(x, "tp", to="varying") if "tp" in manual else x
        return jax.lax.scan(layer, start, w)[0][None]

    def varies(x, y):
        have = [jax.typeof(a).manual_axis_type.varying for a in (x, y)]
        return "tp" in have[1] - have[0]

    mapped = jax.shard_map(
        layers,
        in_specs=(meshes.only(("dp",), *manual), meshes.only(columns, *manual)),
        out_specs=meshes.only(("tp", "dp"), *manual),
        axis_names=set(manual),
    )
    placed = meshes.place(mesh, x, "dp"), meshes.place(mesh, w, *columns)
    got = wrap(jax.jit(mapped))(*placed)
    want = x.astype(np.float64)
    for one in w:
        want = want + want @ one
    for copy in got:  # one of each part of tp where that is mapped
        assert_shards_close(copy, want, reduced=16, roundings=8)


# --- exported, donated ----------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_export_round_trip_with_gradients(rng, devices):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")
    x, w = cases.random(rng, (8, 16)), cases.random(rng, (16, 24))
    with meshes.entered("explicit", {"tp": devices}) as mesh:
        placed = meshes.place(mesh, x, None, "tp"), meshes.place(mesh, w, "tp")
        step = jax.jit(jax.value_and_grad(lambda x, w: so.gemm(x, w).sum(), (0, 1)))
        blob = jax.export.export(step)(*placed).serialize()
        value, (dx, dw) = jax.jit(jax.export.deserialize(blob).call)(*placed)
    x, w = x.astype(np.float64), w.astype(np.float64)
    np.testing.assert_allclose(float(value), (x @ w).sum(), rtol=1e-4, atol=1e-3)
    assert_shards_close(dx, np.broadcast_to(w.sum(1), x.shape), reduced=24)
    assert_shards_close(dw, np.broadcast_to(x.sum(0)[:, None], w.shape), reduced=8)


def test_donated_operand_is_never_overwritten_before_its_last_use(rng, mesh):
    """x is donated, of the shape of the result, an operand twice, and used once more afterwards."""
    x, w = cases.random(rng, (16, 16)), cases.random(rng, (16, 16))

    def f(x, w):
        y = so.gemm(x, w, add=x, activation="silu")
        return y, so.rms_norm(x, w[0], add=y), x * 2

    want = references.gemm_reference(x, w, add=x, activation="silu")
    spec = ("dp", "tp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        placed = meshes.place(mesh, x.copy(), *spec), meshes.place(mesh, w)
        y, z, twice = jax.jit(f, donate_argnums=0)(*placed)
    assert_shards_close(y, want, reduced=16, roundings=3)
    norm = references.rms_norm_reference(x, w[0], add=want.astype(np.float32))
    assert_shards_close(z, norm.y, reduced=16, roundings=8)
    assert_shards_close(twice, 2.0 * x, reduced=1)


# --- no mesh object, logical names ----------------------------------------------------------------


def test_gradient_outside_of_any_mesh_context(rng):
    """Operands on one device, then on a mesh that is in no context: the types say all."""
    x, w, c = (cases.random(rng, s) for s in ((8, 16), (16, 24), (8, 24)))
    wanted = references.gemm_vjp_reference(c, x, w)

    def gradients(x, w, c):
        return jax.grad(lambda x, w: jnp.sum(so.gemm(x, w) * c), (0, 1))(x, w)

    def check(got):
        assert_shards_close(got[0], wanted.lhs, reduced=24)
        assert_shards_close(got[1], wanted.rhs, reduced=16)

    check(gradients(*map(jnp.asarray, (x, w, c))))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind, kind))
        placed = [meshes.place(mesh, a, *s) for a, s in ((x, ("dp",)), (w, (None, "tp")), (c, ()))]
        check(jax.jit(gradients)(*placed))


def test_flax_dense_general_with_logical_axes(rng, auto_mesh):
    """A kernel [d, heads, h] whose logical names rules turn into tp, and dot_general= of shardops:
    the layer is column-parallel, and moves nothing."""
    nn = pytest.importorskip("flax.linen", reason="needs flax")
    rules = (("embed", None), ("heads", "tp"), ("depth", None), ("batch", "dp"))
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "heads", "depth"))
    layer = nn.DenseGeneral((4, 8), use_bias=False, kernel_init=init, dot_general=so.dot_general)
    x = cases.random(rng, (8, 16))
    variables = layer.init(jax.random.key(0), jnp.asarray(x))
    logical = nn.get_partition_spec(variables)
    shardings = nn.logical_to_mesh_sharding(logical, auto_mesh, rules)
    kernel = nn.meta.unbox(variables)["params"]["kernel"]
    placed = {"params": {"kernel": jax.device_put(kernel, shardings["params"]["kernel"])}}
    assert meshes.same(placed["params"]["kernel"].sharding.spec, P(None, "tp"))
    xs = meshes.place(auto_mesh, x, "dp")
    out = NamedSharding(auto_mesh, P("dp", "tp"))
    program = compiled(layer.apply, placed, xs, out=out)
    assert hlo.summary(program) == {}
    want = np.einsum("bd,dhe->bhe", x.astype(np.float64), np.asarray(kernel))
    assert_close(program(placed, xs), want, reduced=16)
