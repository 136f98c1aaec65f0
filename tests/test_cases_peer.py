"""Shapes and options of TransformerEngine's own tests, values and gradients against float64.

Its quantised products and norms are in `test_cases_quantised.py`; norms with dense layers and MLPs,
gated or not, on meshes and on one device, in `layers/test_norm_layers.py`; its longest softmax rows
in `gpu/test_softmax_gpu.py`. The largest of its softmax arrays have fewer heads or batches here.
"""

import itertools

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import calls, cases, meshes
from tests.closeness import assert_shards_close
from tests.primitives import test_softmax_reference as oracle
from tests.primitives.test_softmax_reference import SoftmaxCase

both_norms = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])


@both_norms
@pytest.mark.parametrize("shape", [(256, 128), (128, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("epsilon, centred", [*itertools.product((1e-2, 1e-6), (False, True))])
def test_norms(rng, op, shape, dtype, epsilon, centred):
    case = cases.NormCase("", shape, beta=True, epsilon=epsilon, zero_centered_gamma=centred)
    arrays, cotangents = calls.norm_arrays(op, case, rng, dtype)
    got, gradients = calls.value_and_gradients(calls.norm(op, case), arrays, cotangents)
    calls.check_norm(case, got, gradients, calls.norm_wanted(op, case, arrays, cotangents))


@pytest.mark.parametrize("m, n, k", [(64, 32, 64), (64, 128, 128)])
@pytest.mark.parametrize("i, j", [*itertools.product((0, 1), repeat=2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_in_every_layout(rng, m, n, k, i, j, dtype):
    lhs, rhs = (m, k) if i == 1 else (k, m), (k, n) if j == 0 else (n, k)
    case = cases.GemmCase("", lhs, rhs, ((i,), (j,)), bias=True)
    arrays, cotangent = calls.gemm_arrays(case, rng, dtype), cases.random(rng, (m, n), dtype)
    got, gradients = calls.value_and_gradients(calls.gemm(case), arrays, (cotangent,))
    calls.check_gemm(case, got, gradients, calls.gemm_wanted(case, arrays, cotangent))


SOFTMAX = [
    SoftmaxCase("", (8, 16, 16, 16), scale=0.125),
    SoftmaxCase("", (2, 2, 512, 512), (2, 1, 512, 512), scale=0.125),
    SoftmaxCase("", (2, 2, 511, 512), causal="upper_left", scale=0.125),
    SoftmaxCase("", (1, 2, 8, 16384), (1, 1, 8, 16384), scale=0.125),
    SoftmaxCase("", (8, 16, 16, 16), (8, 1, 16, 16), causal="upper_left", scale=0.125),
]


@pytest.mark.parametrize("case", SOFTMAX, ids=lambda case: "x".join(map(str, case.shape)))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softmax(rng, case, dtype):
    arrays, dy = case.arrays(rng, dtype), cases.random(rng, case.shape, dtype)
    rest = {n: a for n, a in arrays.items() if n != "x"}
    got, gradients = calls.value_and_gradients(
        lambda x: so.softmax(x, **rest, **case.options), {"x": arrays["x"]}, (dy,)
    )
    oracle.check(case, got, gradients["x"], arrays, dy)


# --- on several devices -------------------------------------------------------------------------

MESHES = [{"dp": 2, "fsdp": 2, "tpsp": 2}, {"dp": 2, "tpsp": 2}, {"dp": 2}, {"tpsp": 2}]
each_mesh = pytest.mark.parametrize("sizes", MESHES, ids="-".join)
each_kind = pytest.mark.parametrize("kind", ["auto", "explicit"])


def present(sizes, *spec):
    """A spec without the axes that a mesh lacks."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return tuple(tuple(a for a in entry if a in sizes) for entry in entries)


@each_mesh
@each_kind
@both_norms
def test_norms_on_meshes(rng, op, kind, sizes):
    """Rows over data-parallel axes: gamma's and beta's cotangents are summed over just these."""
    case = cases.NormCase("", (64, 64), beta=True)
    arrays, cotangents = calls.norm_arrays(op, case, rng, "float32")
    wanted = calls.norm_wanted(op, case, arrays, cotangents)
    with meshes.entered(kind, sizes) as mesh:
        rows = present(sizes, ("dp", "fsdp"), None)
        placed = {n: meshes.place(mesh, a, *(rows if n == "x" else ())) for n, a in arrays.items()}
        dy = meshes.place(mesh, cotangents[0], *rows)
        got, gradients = calls.value_and_gradients(calls.norm(op, case), placed, (dy,))
        calls.check_norm(case, got, gradients, wanted, check=assert_shards_close)


@each_mesh
@pytest.mark.parametrize("way, kind", [("column", "auto"), ("row", "explicit")])
def test_dense_on_meshes(rng, way, kind, sizes):
    """The sequence over tpsp outside of the two, features inside."""
    case = cases.GemmCase("", (256, 128, 256), (256, 256))
    arrays = calls.gemm_arrays(case, rng, "float32")
    cotangent = cases.random(rng, (256, 128, 256))
    wanted = calls.gemm_wanted(case, arrays, cotangent)
    batch = ("dp", "fsdp")
    outside, inside = (batch, "tpsp", None), (batch, None, "tpsp")
    x, w, out = {
        "column": (outside, ("fsdp", "tpsp"), inside),
        "row": (inside, ("tpsp", "fsdp"), outside),
    }[way]
    with meshes.entered(kind, sizes) as mesh:
        placed = {
            "lhs": meshes.place(mesh, arrays["lhs"], *present(sizes, *x)),
            "rhs": meshes.place(mesh, arrays["rhs"], *present(sizes, *w)),
        }
        asked = P(*present(sizes, *out))
        product = calls.gemm(case, out_sharding=asked, batch_dims=((0, 1), ()))
        dy = meshes.place(mesh, cotangent, *asked)
        got, gradients = calls.value_and_gradients(product, placed, (dy,))
        calls.check_gemm(case, got, gradients, wanted, check=assert_shards_close)


@pytest.mark.parametrize(
    "sizes, case",
    [
        (MESHES[0], SoftmaxCase("", (32, 12, 128, 128), scale=1.0)),
        (MESHES[1], SoftmaxCase("", (32, 12, 128, 128), scale=3.0)),
        (MESHES[0], SoftmaxCase("", (4, 2, 1024, 1024), causal="upper_left", scale=3.0)),
    ],
    ids=["scores-1", "scores-3", "causal"],
)
def test_softmax_on_meshes(rng, case, sizes):
    """Batch and heads are sharded: nothing moves."""
    shape = case.shape
    x, dy = cases.random(rng, shape, "bfloat16"), cases.random(rng, shape, "bfloat16")
    with meshes.entered("explicit", sizes) as mesh:
        spec = present(sizes, ("dp", "fsdp"), "tpsp")
        operands = [meshes.place(mesh, a, *spec) for a in (x, dy)]

        def both(x, dy):
            y, pull = jax.vjp(lambda x: so.softmax(x, **case.options), x)
            return y, pull(dy)[0]

        program = jax.jit(both).lower(*operands).compile()
        assert not hlo.collectives(program)
        got = program(*operands)
    oracle.check(case, *got, {"x": x}, dy)
