"""softmax on every kind of mesh and layout: the values and gradients of one device."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardops.primitives.softmax import softmax
from tests import calls, cases, meshes
from tests.closeness import assert_shards_close
from tests.primitives import test_softmax_reference as oracle
from tests.primitives.test_softmax_reference import SoftmaxCase

SHAPE = (4, 8, 8, 16)  # batch, heads, queries, keys

CASES = [
    SoftmaxCase("plain", SHAPE, scale=0.5),
    SoftmaxCase("mask", SHAPE, (4, 1, 8, 16)),
    SoftmaxCase("upper-left", SHAPE, causal="upper_left"),
    SoftmaxCase("both", SHAPE, (1, 8, 1, 16), "bottom_right", 0.5),
    SoftmaxCase("tall", (4, 8, 16, 8), (16, 8), "bottom_right"),
]

LAYOUTS = [
    (),
    ("dp",),
    (None, "tp"),
    ("dp", "tp"),
    ("dp", None, "tp"),
    (None, None, ("dp", "tp")),
    (None, None, ("tp", "dp")),
    (None, "tp", "dp"),
    ("dp", None, None, "tp"),
    (None, None, "dp", "tp"),
    (None, None, "tp", "dp"),
    (None, None, None, ("dp", "tp")),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_layout = pytest.mark.parametrize("spec", LAYOUTS, ids=str)


def _only_sharded(shape, spec):
    """A spec without the entries of dims of size 1, for an array with the last dims of x."""
    spec = (*spec, *(None,) * (4 - len(spec)))[4 - len(shape) :]
    return tuple(None if n == 1 else entry for n, entry in zip(shape, spec, strict=True))


def run(mesh, case, spec, rng, *, mask_spec=(), dy_spec=(), f=softmax):
    arrays, dy = case.arrays(rng, "float32"), cases.random(rng, case.shape)
    rest = {n: meshes.place(mesh, a, *mask_spec) for n, a in arrays.items() if n != "x"}
    got, gradients = calls.value_and_gradients(
        lambda x: f(x, **rest, **case.options),
        {"x": meshes.place(mesh, arrays["x"], *spec)},
        (meshes.place(mesh, dy, *dy_spec),),
    )
    check(case, got, gradients["x"], arrays, dy)


def check(case, got, dx, arrays, dy):
    y = oracle.softmax_reference(**arrays, **case.options)
    want = oracle.softmax_vjp_reference(dy, **arrays, **case.options)
    assert_shards_close(got, y, reduced=case.shape[-1], what="y")
    assert_shards_close(dx, want, reduced=case.shape[-1], roundings=3, what="dx")


@every_layout
@every_case
def test_softmax_on_a_mesh(rng, any_mesh, case, spec):
    run(any_mesh, case, spec, rng)


@every_layout
def test_softmax_takes_a_mask_laid_out_as_x(rng, mesh, spec):
    for case in CASES:
        if case.mask is not None:
            run(mesh, case, spec, rng, mask_spec=_only_sharded(case.mask, spec))


@pytest.mark.parametrize("mask_spec", [("dp",), (None, None, "tp"), (None, None, None, "tp")])
def test_softmax_takes_a_mask_laid_out_otherwise(rng, mesh, mask_spec):
    run(mesh, CASES[1], ("dp", "tp"), rng, mask_spec=mask_spec)


@pytest.mark.parametrize("dy_spec", [("dp",), (None, None, "tp"), (None, None, "dp", "tp")])
def test_softmax_takes_a_cotangent_laid_out_otherwise(rng, auto_mesh, dy_spec):
    """The gradient follows x, whatever the layout of what flows back."""
    for spec in LAYOUTS[4], LAYOUTS[8]:
        run(auto_mesh, CASES[3], spec, rng, dy_spec=dy_spec)


@pytest.mark.parametrize("sizes", [{"dp": 1, "tp": 8}, {"dp": 8, "tp": 1}, {"dp": 1, "tp": 1}])
@pytest.mark.parametrize("kind", meshes.KINDS)
def test_softmax_on_axes_of_one_device(rng, kind, sizes):
    with meshes.entered(kind, sizes) as mesh:
        run(mesh, CASES[2], (None, None, ("dp", "tp")), rng)


@pytest.mark.parametrize("seed", range(40))
def test_softmax_on_a_random_layout(seed):
    rng = np.random.default_rng(2000 + seed)
    kind = list(meshes.KINDS)[seed % 4]
    sizes = [meshes.SIZES, {"a": 2, "b": 2, "c": 2}][int(rng.integers(2))]
    shape = [(8, 64), (4, 8, 24), (2, 4, 6, 16), (2, 2, 4, 16, 4), (64,)][int(rng.integers(5))]
    mask = tuple(n if rng.integers(2) else 1 for n in shape) if rng.integers(2) else None
    causal = oracle.CAUSAL[int(rng.integers(3)) if len(shape) > 1 else 0]
    case = SoftmaxCase("", shape, mask, causal, float(rng.uniform(-2, 2)))
    spec = meshes.random_spec(rng, shape, sizes)
    mask_spec = () if mask is None else meshes.random_spec(rng, mask, sizes)
    with meshes.entered(kind, sizes) as mesh:
        run(mesh, case, spec, rng, mask_spec=mask_spec)


@pytest.mark.parametrize("spec", [("tp",), (None, "tp"), (None, ("dp", "tp")), (None, None, "tp")])
@pytest.mark.parametrize("causal", oracle.CAUSAL)
def test_softmax_of_dims_that_the_axes_do_not_divide(rng, auto_mesh, spec, causal):
    """3 batches, 6 queries and 30 keys over 4: padding must not get into a row."""
    case = SoftmaxCase("", (3, 6, 30), (6, 30), causal)

    def f(x, **options):
        x = np.float32(0.5) * (2 * x)  # exact, and a place for the constraint to hold
        x = jax.lax.with_sharding_constraint(x, NamedSharding(auto_mesh, P(*spec)))
        return softmax(x, **options)

    run(auto_mesh, case, (), rng, f=f)


@pytest.mark.parametrize("causal", oracle.CAUSAL)
def test_softmax_of_an_axis_that_a_reshape_has_split(rng, auto_mesh, causal):
    """16 = 2 x 8 over tp=4: half of tp cuts queries, the other half keys; and 2 heads, queries."""

    def f(x, **options):
        x = jax.lax.with_sharding_constraint(
            x.reshape(8, 16) * 1.0, NamedSharding(auto_mesh, P("dp", "tp"))
        )
        return softmax(x.reshape(shape), **options)

    for shape in (8, 2, 8), (8, 2, 8, 1), (4, 2, 2, 8):
        run(auto_mesh, SoftmaxCase("", shape, causal=causal), (), rng, f=f)


@pytest.mark.parametrize("case", oracle.EMPTY, ids=lambda case: case.id)
def test_softmax_of_nothing_on_a_mesh(rng, any_mesh, case):
    arrays = case.arrays(rng, "float32")
    x = meshes.place(any_mesh, arrays.pop("x"))
    y, pull = jax.vjp(jax.jit(lambda x: softmax(x, **arrays, **case.options)), x)
    assert y.shape == pull(y)[0].shape == case.shape


def test_softmax_of_an_empty_batch_that_is_sharded(any_mesh):
    x = meshes.place(any_mesh, np.zeros((0, 8, 8), np.float32), None, "tp", "dp")
    assert jax.jit(lambda x: softmax(x, causal="upper_left"))(x).shape == x.shape


@every_case
def test_softmax_eager_on_sharded_arrays(rng, mesh, case):
    arrays = case.arrays(rng, "float32")
    placed = {n: meshes.place(mesh, a) for n, a in arrays.items()}
    placed["x"] = meshes.place(mesh, arrays["x"], "dp", None, "tp")
    got = softmax(**placed, **case.options)
    assert_shards_close(got, oracle.softmax_reference(**arrays, **case.options), reduced=16)


# --- inside shard_map ---------------------------------------------------------------------------

vma = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])


@vma
@pytest.mark.parametrize("manual", [("dp", "tp"), ("dp",), ("tp",)], ids="+".join)
@pytest.mark.parametrize("case", [CASES[2], CASES[3]], ids=lambda case: case.id)
def test_softmax_manual(rng, mesh, case, manual, check_vma):
    """Batch and heads manual; the mask is the same along the batch. What is not manual partitions
    itself: heads or queries."""
    layout = ("dp", None, "tp") if manual == ("dp",) and case.causal else ("dp", "tp")
    x_spec = meshes.only(layout, *manual)
    mask_layout = _only_sharded(case.mask or SHAPE, layout)
    mask_spec = meshes.only(mask_layout, *manual)

    def f(x, mask=None, **options):
        arrays, specs = ((x,), (x_spec,)) if mask is None else ((x, mask), (x_spec, mask_spec))
        mapped = jax.shard_map(
            lambda x, mask=None: softmax(x, mask=mask, **options),
            mesh=mesh,
            in_specs=specs,
            out_specs=x_spec,
            axis_names=set(manual),
            check_vma=check_vma,
        )
        return mapped(*arrays)

    run(mesh, case, layout, rng, mask_spec=mask_layout, f=f)


@vma
def test_softmax_causal_in_shard_map_is_that_of_the_shard(rng, mesh, check_vma):
    """Manual axes are the user's: 8 queries over tp are 4 softmaxes of 2."""
    x = cases.random(rng, (8, 8))
    f = jax.shard_map(
        lambda x: softmax(x, causal="upper_left"),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P("tp"),
        check_vma=check_vma,
    )
    got = jax.jit(f)(meshes.place(mesh, x, "tp"))
    parts = [oracle.softmax_reference(p, causal="upper_left") for p in np.split(x, 4)]
    assert_shards_close(got, np.concatenate(parts), reduced=8)


def test_softmax_on_three_axes_keeps_each_query_in_its_place(rng):
    """Every order of three axes on the queries, on every mix of kinds."""
    sizes = {"a": 2, "b": 2, "c": 2}
    case = SoftmaxCase("", (16, 16), causal="upper_left")
    for kind, order in itertools.product(meshes.KINDS, itertools.permutations(sizes)):
        with meshes.entered(kind, sizes) as mesh:
            run(mesh, case, (order,), rng)
