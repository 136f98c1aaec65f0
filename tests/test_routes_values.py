"""gemm on every kind of mesh and layout: the values and gradients of one device, on each device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import calls, cases, meshes, references
from tests.closeness import assert_shards_close

MLP = cases.GemmCase("mlp", (8, 16, 32), (32, 64), bias=True, activation="gelu")

# of lhs [b, s, k], rhs [k, n] and result [b, s, n]
LAYOUTS = {
    "replicated": ((), (), ()),
    "column": (("dp",), (None, "tp"), ("dp", None, "tp")),
    "row": (("dp", None, "tp"), ("tp",), ("dp",)),
    "row-scattered": (("dp", None, "tp"), ("tp",), ("dp", "tp")),
    "row-scattered-over-columns": (("dp", None, "tp"), ("tp",), ("dp", None, "tp")),
    "fsdp": (("dp",), ("dp",), ("dp",)),
    "fsdp-columns": (("dp",), (None, "dp"), ("dp",)),
    "fsdp-and-column": (("dp",), ("dp", "tp"), ("dp", None, "tp")),
    "sequence-parallel": (("dp", "tp"), (None, "tp"), ("dp", None, "tp")),
    "k-of-lhs-alone": ((None, None, "tp"), (), ()),
    "k-of-rhs-alone": ((), ("tp",), ()),
    "k-over-other-axes": ((None, None, "tp"), ("dp",), ()),
    "free-dims-of-both": (("tp",), (None, "tp"), ()),
    "two-axes-on-rows": ((("dp", "tp"),), (), (("dp", "tp"),)),
    "two-axes-on-k": ((None, None, ("dp", "tp")), (("dp", "tp"),), ()),
    "two-axes-on-k-in-another-order": ((None, None, ("tp", "dp")), (("dp", "tp"),), ()),
    "k-over-a-prefix": ((None, None, ("dp", "tp")), ("dp",), ()),
    "result-over-unrelated-dims": (("dp",), (None, "tp"), ("tp", "dp")),
}


def run(mesh, case, specs, rng, *, want_out=True, **options):
    """Value and gradients with operands and result laid out as `specs` say, checked everywhere."""
    *_, out = specs
    arrays = calls.gemm_arrays(case, rng, "float32")
    cotangent = cases.random(rng, case.lhs_free + case.rhs_free)
    wanted = calls.gemm_wanted(case, arrays, cotangent)
    by_name = {"lhs": specs[0], "rhs": specs[1], "bias": (), "add": ()}
    placed = {n: meshes.place(mesh, a, *by_name[n]) for n, a in arrays.items()}
    explicit = meshes.explicit_axes(mesh)
    if want_out and explicit:
        options["out_sharding"] = meshes.explicit_part(mesh, out)
    f = calls.gemm(case, **options)

    def laid_out(**arrays):
        result = f(**arrays)
        if want_out and explicit:
            assert meshes.same(jax.typeof(result).sharding.spec, options["out_sharding"])
        if want_out and not explicit:
            result = jax.lax.with_sharding_constraint(result, NamedSharding(mesh, P(*out)))
        return result

    got, gradients = calls.value_and_gradients(laid_out, placed, (meshes.place(mesh, cotangent),))
    calls.check_gemm(case, got, gradients, wanted, assert_shards_close)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gemm_on_a_mesh(rng, any_mesh, layout):
    run(any_mesh, MLP, LAYOUTS[layout], rng)


@pytest.mark.parametrize("layout", ["row", "column", "sequence-parallel", "free-dims-of-both"])
def test_gemm_chooses_a_sharding_of_the_result(rng, mesh, layout):
    run(mesh, MLP, LAYOUTS[layout], rng, want_out=False)
    run(mesh, MLP, LAYOUTS[layout], rng, want_out=False, out_sharding="cheapest")


@pytest.mark.parametrize("sizes", [{"dp": 1, "tp": 8}, {"dp": 8, "tp": 1}, {"dp": 1, "tp": 1}])
@pytest.mark.parametrize("kind", meshes.KINDS)
@pytest.mark.parametrize("layout", ["row-scattered", "two-axes-on-k"])
def test_gemm_on_axes_of_one_device(rng, kind, sizes, layout):
    with meshes.entered(kind, sizes) as mesh:
        run(mesh, MLP, LAYOUTS[layout], rng)


CONTRACTIONS = [
    cases.GemmCase("plain", (8, 16), (16, 8)),
    cases.GemmCase("rows", (4, 8, 16), (16, 8), bias=True, activation="silu"),
    cases.GemmCase("weight-gradient", (8, 4, 8), (8, 4, 16), ((0, 1), (0, 1))),
    cases.GemmCase("apart", (8, 4, 16), (16, 3, 8), ((0, 2), (2, 0)), bias=True),
    cases.GemmCase("odd", (6, 8, 5), (5, 8, 9), ((2, 1), (0, 1)), activation="gelu"),
    cases.GemmCase("dense-general", (2, 8, 4, 8), (4, 8, 8, 2), ((2, 3), (0, 1)), add=True),
]


@pytest.mark.parametrize("seed", range(60))
def test_gemm_on_a_random_layout(seed):
    rng = np.random.default_rng(seed)
    case = CONTRACTIONS[seed % len(CONTRACTIONS)]
    kind = list(meshes.KINDS)[seed // len(CONTRACTIONS) % 4]
    sizes = [meshes.SIZES, {"a": 2, "b": 2, "c": 2}][int(rng.integers(2))]
    out_shape = case.lhs_free + case.rhs_free
    specs = [meshes.random_spec(rng, s, sizes) for s in (case.lhs, case.rhs, out_shape)]
    like = tuple(
        tuple(int(d) for d in range(len(s)) if rng.integers(2)) for s in (case.lhs, case.rhs)
    )
    with meshes.entered(kind, sizes) as mesh:
        run(mesh, case, specs, rng, want_out=bool(rng.integers(4)), batch_dims=like)


@pytest.mark.parametrize("case", cases.DOT_CASES[2:10], ids=lambda case: case.id)
@pytest.mark.parametrize("seed", range(2))
def test_dot_general_on_a_random_layout(rng, mesh, case, seed):
    def grown(shape):  # so that the axes divide most dims
        return tuple(4 * n for n in shape)

    shapes = grown(case.lhs), grown(case.rhs)
    lhs, rhs = (cases.random(rng, s) for s in shapes)
    specs = [meshes.random_spec(rng, s, meshes.SIZES) for s in shapes]
    want = references.dot_general_reference(lhs, rhs, case.numbers)
    cotangent = cases.random(rng, want.shape)
    wanted = references.dot_general_vjp_reference(cotangent, lhs, rhs, case.numbers)
    got, gradients = calls.value_and_gradients(
        lambda lhs, rhs: so.dot_general(lhs, rhs, case.numbers),
        {"lhs": meshes.place(mesh, lhs, *specs[0]), "rhs": meshes.place(mesh, rhs, *specs[1])},
        (meshes.place(mesh, cotangent),),
    )
    reduced = want.size  # no shorter than any sum here
    assert_shards_close(got, want, reduced=16 * case.reduced, what="value")
    assert_shards_close(gradients["lhs"], wanted[0], reduced=reduced, what="gradient of lhs")
    assert_shards_close(gradients["rhs"], wanted[1], reduced=reduced, what="gradient of rhs")


# --- what only Auto axes have -------------------------------------------------------------------


def constrained(mesh, x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


UNEVEN = {
    "k": ((None, "tp"), ("tp",)),
    "rows": (("tp",), ()),
    "columns": ((), (None, "tp")),
    "k-and-rows": (("dp", "tp"), ("tp", "dp")),
    "k-of-two-axes": ((None, ("dp", "tp")), (("dp", "tp"),)),
}


@pytest.mark.parametrize("layout", UNEVEN)
def test_gemm_of_dims_that_the_axes_do_not_divide(rng, auto_mesh, layout):
    """The padding of the last shard must not get into a sum: the exponential makes it 1."""
    case = cases.GemmCase("", (6, 30), (30, 9), bias=True)
    arrays = calls.gemm_arrays(case, rng, "float32")
    cotangent = cases.random(rng, (6, 9))
    left, right = UNEVEN[layout]

    def f(lhs, rhs, bias):
        lhs = constrained(auto_mesh, jnp.exp(lhs), *left)
        rhs = constrained(auto_mesh, jnp.exp(rhs), *right)
        return so.gemm(lhs, rhs, bias=bias)

    got, gradients = calls.value_and_gradients(f, arrays, (cotangent,))
    lhs, rhs = (np.exp(arrays[n].astype(np.float64)) for n in ("lhs", "rhs"))
    value, inner = calls.gemm_wanted(case, {**arrays, "lhs": lhs, "rhs": rhs}, cotangent)
    wanted = dataclasses.replace(inner, lhs=inner.lhs * lhs, rhs=inner.rhs * rhs)
    calls.check_gemm(case, got, gradients, (value, wanted), assert_shards_close)


def test_gemm_of_an_axis_that_a_reshape_has_split(rng, auto_mesh):
    """16 = 2 heads x 8 over tp=4: half of tp cuts the heads, the other half their dims."""
    x, w = cases.random(rng, (8, 16)), cases.random(rng, (2, 8, 32))

    @jax.jit
    def f(x, w):
        x = constrained(auto_mesh, x * 1.0, "dp", "tp").reshape(8, 2, 8)
        return so.gemm(x, w, contracting_dims=((1, 2), (0, 1)))

    assert_shards_close(f(x, w), np.einsum("bhd,hdn->bn", x.reshape(8, 2, 8), w), reduced=16)


@pytest.mark.parametrize("entered", [True, False])
def test_gemm_eager_on_sharded_arrays(rng, entered):
    """Outside jit, with the mesh in the arrays alone or the ambient one too."""
    mesh = meshes.make("auto")
    arrays = calls.gemm_arrays(MLP, rng, "float32")
    lhs, rhs, _ = LAYOUTS["row"]
    placed = {
        "lhs": meshes.place(mesh, arrays["lhs"], *lhs),
        "rhs": meshes.place(mesh, arrays["rhs"], *rhs),
        "bias": arrays["bias"],
    }
    want, _ = calls.gemm_wanted(MLP, arrays, np.zeros((8, 16, 64)))
    if entered:
        with jax.set_mesh(mesh):
            got = calls.gemm(MLP)(**placed)
    else:
        got = calls.gemm(MLP)(**placed)
    assert_shards_close(got, want, reduced=32, roundings=3)


def test_gemm_eager_on_an_explicit_mesh(rng, explicit_mesh):
    arrays = calls.gemm_arrays(MLP, rng, "float32")
    lhs, rhs, out = LAYOUTS["row-scattered"]
    placed = {
        "lhs": meshes.place(explicit_mesh, arrays["lhs"], *lhs),
        "rhs": meshes.place(explicit_mesh, arrays["rhs"], *rhs),
        "bias": meshes.place(explicit_mesh, arrays["bias"]),
    }
    want, _ = calls.gemm_wanted(MLP, arrays, np.zeros((8, 16, 64)))
    got = calls.gemm(MLP, out_sharding=P(*out))(**placed)
    assert meshes.same(got.sharding.spec, P(*out))
    assert_shards_close(got, want, reduced=32, roundings=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gemm_reduces_low_precision(rng, mesh, dtype):
    """Partial sums may be rounded once each before they are added, the result once more."""
    case = cases.GemmCase("", (8, 16, 32), (32, 64))
    arrays = calls.gemm_arrays(case, rng, dtype)
    want, _ = calls.gemm_wanted(case, arrays, np.zeros((8, 16, 64)))
    placed = [
        meshes.place(mesh, arrays["lhs"], "dp", None, "tp"),
        meshes.place(mesh, arrays["rhs"], "tp"),
    ]
    got = jax.jit(so.gemm)(*placed)
    assert got.dtype == jnp.dtype(dtype)
    assert_shards_close(got, want, reduced=32, roundings=2)
    precise = jax.jit(lambda a, b: so.gemm(a, b, precise_accumulation=True))(*placed)
    assert_shards_close(precise, want, reduced=32, roundings=1)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gemm_gradient_after_the_mesh_context_was_left(rng, kind):
    """The operands' types say all: the backward needs no ambient mesh."""
    case = cases.GemmCase("", (8, 16, 32), (32, 64), activation="silu")
    arrays = calls.gemm_arrays(case, rng, "float32")
    cotangent = cases.random(rng, (8, 16, 64))
    with meshes.entered(kind) as mesh:
        lhs = meshes.place(mesh, arrays["lhs"], "dp", None, "tp")
        rhs = meshes.place(mesh, arrays["rhs"], "tp")
        got, pull = jax.vjp(lambda lhs, rhs: calls.gemm(case)(lhs=lhs, rhs=rhs), lhs, rhs)
    gradients = pull(meshes.place(mesh, cotangent, *got.sharding.spec))
    wanted = calls.gemm_wanted(case, arrays, cotangent)
    named = dict(zip(("lhs", "rhs"), gradients, strict=True))
    calls.check_gemm(case, got, named, wanted, assert_shards_close)
