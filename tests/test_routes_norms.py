"""The norms on every kind of mesh and layout: the values and gradients of one device."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import calls, cases, meshes
from tests.closeness import assert_shards_close

FULL = cases.NormCase(
    "full", (8, 16, 32), beta=True, add=True, return_input=True, zero_centered_gamma=True
)

# of x and add [b, s, h], of gamma and beta [h]
LAYOUTS = {
    "replicated": ((), ()),
    "data": (("dp",), ()),
    "sequence": (("dp", "tp"), ()),
    "sequence-alone": ((None, "tp"), ()),
    "two-axes-on-a-dim": ((("dp", "tp"),), ()),
    "two-axes-in-another-order": ((("tp", "dp"),), ()),
    "gamma-sharded": (("dp",), ("tp",)),
    "gamma-over-an-axis-of-the-rows": (("dp", "tp"), ("dp",)),
    "gamma-over-all-axes": (("dp",), (("dp", "tp"),)),
    "h": ((None, None, "tp"), ("tp",)),
    "h-and-data": (("dp", None, "tp"), ("tp",)),
    "h-of-two-axes": ((None, None, ("dp", "tp")), ()),
}


def run(mesh, op, case, specs, rng, *, cotangent_spec=(), **options):
    arrays, cotangents = calls.norm_arrays(op, case, rng, "float32")
    wanted = calls.norm_wanted(op, case, arrays, cotangents)
    rows, vector = specs
    by_name = {"x": rows, "add": rows, "gamma": vector, "beta": vector}
    placed = {n: meshes.place(mesh, a, *by_name[n]) for n, a in arrays.items()}
    got, gradients = calls.value_and_gradients(
        calls.norm(op, case, **options),
        placed,
        tuple(meshes.place(mesh, c, *cotangent_spec) for c in cotangents),
    )
    calls.check_norm(case, got, gradients, wanted, assert_shards_close)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rms_norm_on_a_mesh(rng, any_mesh, layout):
    run(any_mesh, "rms_norm", FULL, LAYOUTS[layout], rng)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norm_on_a_mesh(rng, mesh, layout):
    run(mesh, "layer_norm", FULL, LAYOUTS[layout], rng)


@pytest.mark.parametrize("stats", ["gather", "distributed"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("layout", ["data", "h", "h-and-data", "h-of-two-axes"])
def test_norm_stats_change_no_value(rng, mesh, op, layout, stats):
    run(mesh, op, FULL, LAYOUTS[layout], rng, stats=stats)


@pytest.mark.parametrize("cotangent", [(), ("dp",), (None, "tp")])
def test_norm_takes_a_cotangent_laid_out_otherwise(rng, auto_mesh, cotangent):
    """The gradient follows x, whatever the layout of what flows back."""
    for layout in ("h-and-data", "sequence"):
        run(auto_mesh, "layer_norm", FULL, LAYOUTS[layout], rng, cotangent_spec=cotangent)


@pytest.mark.parametrize("sizes", [{"dp": 1, "tp": 8}, {"dp": 8, "tp": 1}, {"dp": 1, "tp": 1}])
@pytest.mark.parametrize("kind", meshes.KINDS)
def test_norm_on_axes_of_one_device(rng, kind, sizes):
    with meshes.entered(kind, sizes) as mesh:
        run(mesh, "rms_norm", FULL, LAYOUTS["sequence"], rng)


@pytest.mark.parametrize("seed", range(30))
def test_norm_on_a_random_layout(seed):
    rng = np.random.default_rng(1000 + seed)
    op = ("layer_norm", "rms_norm")[seed % 2]
    kind = list(meshes.KINDS)[seed // 2 % 4]
    sizes = [meshes.SIZES, {"a": 2, "b": 2, "c": 2}][int(rng.integers(2))]
    shape = [(8, 64), (4, 8, 24), (2, 4, 6, 16), (64,)][int(rng.integers(4))]
    flags = {
        name: bool(rng.integers(2))
        for name in ("beta", "add", "return_input", "zero_centered_gamma")
    }
    case = cases.NormCase("", shape, **flags)
    specs = meshes.random_spec(rng, shape, sizes), meshes.random_spec(rng, shape[-1:], sizes)
    stats = ("auto", "gather", "distributed")[int(rng.integers(3))]
    with meshes.entered(kind, sizes) as mesh:
        run(mesh, op, case, specs, rng, stats=stats)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("spec", [("tp",), (None, "tp"), (None, ("dp", "tp"))])
def test_norm_of_dims_that_the_axes_do_not_divide(rng, auto_mesh, op, spec):
    """6 rows and 30 columns over 4: padding must not get into a sum. A cosine leaves it at 1."""
    case = cases.NormCase("", (6, 30))
    arrays, cotangents = calls.norm_arrays(op, case, rng, "float32")

    def f(x, gamma):
        x = np.float32(0.5) * (2 * x)  # exact, and a place for the constraint to hold
        x = jax.lax.with_sharding_constraint(x, NamedSharding(auto_mesh, P(*spec)))
        return getattr(so, op)(x, gamma)

    got, gradients = calls.value_and_gradients(f, arrays, cotangents)
    wanted = calls.norm_wanted(op, case, arrays, cotangents)
    calls.check_norm(case, got, gradients, wanted, assert_shards_close)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norm_of_an_axis_that_a_reshape_has_split(rng, auto_mesh, op):
    """16 = 2 x 8 over tp=4: half of tp cuts rows, the other half the normalised dim."""
    x, gamma = cases.random(rng, (8, 16)), cases.random(rng, (8,))
    case = cases.NormCase("", (8, 2, 8))
    arrays = {"x": x.reshape(8, 2, 8), "gamma": gamma}
    cotangent = cases.random(rng, (8, 2, 8))

    def f(x, gamma):
        x = x.reshape(8, 16) * 1.0
        x = jax.lax.with_sharding_constraint(x, NamedSharding(auto_mesh, P("dp", "tp")))
        return getattr(so, op)(x.reshape(8, 2, 8), gamma)

    got, gradients = calls.value_and_gradients(f, arrays, (cotangent,))
    wanted = calls.norm_wanted(op, case, arrays, (cotangent,))
    calls.check_norm(case, got, gradients, wanted, assert_shards_close)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norm_eager_on_sharded_arrays(rng, mesh, op):
    arrays, _ = calls.norm_arrays(op, FULL, rng, "float32")
    rows, vector = LAYOUTS["sequence"]
    placed = {
        n: meshes.place(mesh, a, *(rows if n in ("x", "add") else vector))
        for n, a in arrays.items()
    }
    y, h = calls.norm(op, FULL)(**placed)
    value, _ = calls.norm_wanted(op, FULL, arrays, (np.zeros(FULL.shape),) * 2)
    assert_shards_close(y, value.y, reduced=32)
    assert_shards_close(h, value.h, reduced=1)
