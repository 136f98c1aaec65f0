"""ScaledArray under transformations and on meshes, and what the quantiser refuses."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from shardops.primitives.scaled import ScaledArray, ScalingMode, quantize_reference
from shardops.rules.scales import scale_shape, scale_spec
from shardops.rules.spec import to_partition_spec, to_spec
from tests import cases, meshes
from tests.primitives.refusals import refuses
from tests.quantize.quantisers import LAYOUTS, RECIPES, bits

MODES = {
    ScalingMode.NONE: None,
    ScalingMode.TENSOR_DELAYED: None,
    ScalingMode.TENSOR_CURRENT: None,
    ScalingMode.BLOCK_128: (1, 128),
    ScalingMode.MXFP8: (1, 32),
}

every_mode = pytest.mark.parametrize("mode", MODES)


def quantize(x, mode, block=None):
    more = {"scale_inv": jnp.float32(0.01)} if mode is ScalingMode.TENSOR_DELAYED else {}
    return quantize_reference(x, mode, MODES[mode] if block is None else block, **more)


def equal(got, want):
    """The same type, statics and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))


@every_mode
def test_scaled_through_jit_and_checkpoint(rng, mode):
    scaled = quantize(cases.random(rng, (4, 160), "bfloat16"), mode)
    for wrap in (jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))):
        equal(wrap(lambda s: s)(scaled), scaled)
        got = wrap(lambda s: s.dequantize())(scaled)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(scaled.dequantize()))


def test_scaled_statics_that_are_equal_trace_once():
    traces = []

    @jax.jit
    def f(scaled):
        traces.append(scaled.dtype)
        return scaled.dequantize()

    data, scale = jnp.ones((2, 32), jnp.float8_e4m3fn), jnp.ones((2, 1), jnp.float32)
    for dtype, block in ((jnp.bfloat16, (1, 32)), ("bfloat16", [1, 32])):
        f(ScaledArray(data, scale, None, ScalingMode.MXFP8, dtype, block))
    assert traces == [jnp.bfloat16]
    f(ScaledArray(data, scale, None, ScalingMode.MXFP8, jnp.float32, (1, 32)))
    assert len(traces) == 2


@every_mode
def test_scaled_through_tree_map(rng, mode):
    scaled = quantize(cases.random(rng, (4, 160)), mode)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), scaled)
    assert isinstance(shapes, ScaledArray)
    assert shapes.data.shape == shapes.shape == (4, 160)
    equal(jax.tree.map(lambda a: a, scaled), scaled)
    assert jax.tree.map(lambda a: None, scaled).mode is mode


@every_mode
def test_scaled_through_scan_and_vmap(rng, mode):
    """A stack of three: each array has the new dim in front, and dequantises as a whole too."""
    x = cases.random(rng, (3, 4, 160))
    each = [quantize(a, mode) for a in x]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    want = np.stack([np.asarray(one.dequantize()) for one in each])
    _, scanned = jax.lax.scan(lambda carry, one: (carry, one.dequantize()), 0, stacked)
    mapped = jax.vmap(lambda one: one.dequantize())(stacked)
    for got in (scanned, mapped, stacked.dequantize()):
        np.testing.assert_array_equal(np.asarray(got), want)
    equal(jax.jit(jax.vmap(lambda a: quantize(a, mode)))(x).data, stacked.data)
    carried, _ = jax.lax.scan(lambda carry, _: (carry, None), each[0], length=2)
    equal(carried, each[0])


# --- as objects, of what so.quantize makes --------------------------------------------------------

every_recipe = pytest.mark.parametrize("name", RECIPES)


def made(rng, name, layout="both"):
    x = cases.random(rng, (4, 160))
    return jax.jit(so.quantize)(x, RECIPES[name].quantizer("input", layout))


@every_recipe
def test_scaled_pickled_copied_and_donated(rng, name):
    scaled = made(rng, name)
    for again in (pickle.loads(pickle.dumps(scaled)), copy.copy(scaled), copy.deepcopy(scaled)):
        assert jax.tree.structure(again) == jax.tree.structure(scaled)
        assert bits(again) == bits(scaled)
    want = bits(scaled)
    assert bits(jax.jit(lambda s: s, donate_argnums=0)(scaled)) == want


@every_recipe
def test_scaled_of_types_alone(rng, name):
    """What `eval_shape` gives has shapes, parts and a product's type."""
    for layout in LAYOUTS:
        quantizer = RECIPES[name].quantizer("input", layout)
        types = jax.eval_shape(lambda x, q=quantizer: so.quantize(x, q), _of((3, 4, 160)))
        arrays = jax.jit(so.quantize)(jnp.ones((3, 4, 160)), quantizer)
        for part in (lambda s: s, lambda s: s.transposed, lambda s: s.upright()):
            leaves = [jax.tree.leaves(part(s)) for s in (types, arrays)]
            assert [(a.shape, a.dtype) for a in leaves[0]] == [
                (a.shape, a.dtype) for a in leaves[1]
            ]
        out = jax.eval_shape(lambda s: so.gemm(s, jnp.ones((160, 8))), types.detach())
        assert out.shape == (3, 4, 8)


# --- on meshes ----------------------------------------------------------------------------------


def shardings(scaled, mesh, *spec):
    """Where data laid out by `spec` and its scales lie."""
    data = to_spec(spec, scaled.ndim)
    scales = scale_spec(scaled.shape, data, scaled.block, dict(mesh.shape))
    by_rank = {scaled.ndim: data, 0: ()}
    return jax.tree.map(
        lambda a: NamedSharding(
            mesh, to_partition_spec(data if a is scaled.data else scales if a.ndim else by_rank[0])
        ),
        scaled,
    )


@every_mode
@pytest.mark.parametrize("spec", [("dp",), ("dp", "tp"), (None, ("dp", "tp"))], ids=str)
def test_scaled_device_put(rng, mesh, mode, spec):
    """Each array has its sharding; nothing moves where scales lie as the data."""
    scaled = quantize(cases.random(rng, (8, 1024)), mode)
    placed = jax.device_put(scaled, shardings(scaled, mesh, *spec))
    assert meshes.same(placed.data.sharding.spec, P(*spec))
    equal(placed, scaled)
    dequantize = jax.jit(lambda s: s.dequantize())
    np.testing.assert_array_equal(np.asarray(dequantize(placed)), np.asarray(scaled.dequantize()))
    assert hlo.summary(dequantize.lower(placed).compile()) == {}


LENGTHS = (1024, 1376, 96, 48 * 8, 33)  # over tp: 256, 344, 24, 96 elements, and one that is whole


@every_mode
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("spec", [("dp",), (None, "tp"), ("dp", "tp")], ids=str)
def test_quantize_of_a_sharded_array_gives_the_bits_of_one_device(rng, mesh, mode, length, spec):
    """Also where a shard breaks a block, and with an outlier that one shard alone sees."""
    if length % 4:
        spec = spec[:1]
    x = cases.random(rng, (8, length))
    x[0, 0] = 100
    want = jax.jit(lambda x: quantize(x, mode))(x)
    got = jax.jit(lambda x: quantize(x, mode))(meshes.place(mesh, x, *spec))
    equal(got, want)
    if meshes.explicit_axes(mesh):
        assert meshes.same(jax.typeof(got.data).sharding.spec, P(*spec))
    back = jax.jit(lambda s: s.dequantize())(got)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(want.dequantize()))


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1)], ids=str)
@pytest.mark.parametrize("shape", [(256, 1024), (512, 344), (96, 512)], ids=str)
def test_quantize_of_a_sharded_weight(rng, mesh, shape, block):
    x = cases.random(rng, shape)
    mode = ScalingMode.BLOCK_128
    want = jax.jit(lambda x: quantize(x, mode, block))(x)
    got = jax.jit(lambda x: quantize(x, mode, block))(meshes.place(mesh, x, "dp", "tp"))
    equal(got, want)
    back = jax.jit(lambda s: s.dequantize())(got)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(want.dequantize()))


@every_mode
def test_quantize_moves_numbers_for_one_scale_and_nothing_for_whole_blocks(mesh, mode):
    x = meshes.place(mesh, jnp.ones((8, 1024)), "dp", "tp")
    compiled = jax.jit(lambda x: quantize(x, mode)).lower(x).compile()
    found = hlo.collectives(compiled)
    # Over dp, then over tp: the largest magnitude, and for a scale of now the largest finite one.
    numbers = {ScalingMode.TENSOR_CURRENT: 2, ScalingMode.TENSOR_DELAYED: 1}.get(mode, 0)
    assert [(c.kind, c.bytes) for c in found] == [("all-reduce", 4 * numbers)] * 2 * (numbers > 0)


# --- what it refuses ----------------------------------------------------------------------------


def _of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


BLOCK, MX = ScalingMode.BLOCK_128, ScalingMode.MXFP8


@pytest.mark.parametrize(
    "error, argument, says, x, call",
    [
        (TypeError, "x", ("int32", "float16"), _of((4,), jnp.int32), (MX, (32,))),
        (ValueError, "mode", ("'mxfp8'",), _of((4, 64)), ("mxfp8", (1, 32))),
        (ValueError, "block", ("None", "32", "(4, 64)"), _of((4, 64)), (MX, None)),
        (ValueError, "block", ("(32,)",), _of((4, 64)), (MX, (32,))),
        (ValueError, "block", ("(32, 32)", "one dim"), _of((4, 64)), (MX, (32, 32))),
        (ValueError, "block", ("(1, 1)",), _of((4, 64)), (MX, (1, 1))),
        (ValueError, "block", ("(1, 64)", "128"), _of((4, 64)), (BLOCK, (1, 64))),
        (ValueError, "block", ("(128, 128, 128)",), _of((4, 4, 64)), (BLOCK, (128, 128, 128))),
        (ValueError, "block", ("(1, 32)", "None"), _of((4, 64)), (ScalingMode.NONE, (1, 32))),
        (ValueError, "scale_inv", ("None", "DELAYED"), _of((4, 64)), (ScalingMode.TENSOR_DELAYED,)),
    ],
)
def test_quantize_refuses(error, argument, says, x, call):
    refuses(
        error,
        lambda x: quantize_reference(x, *call),
        x,
        op="quantize",
        argument=argument,
        says=says,
    )


def test_quantize_refuses_format_and_scale():
    current, delayed = ScalingMode.TENSOR_CURRENT, ScalingMode.TENSOR_DELAYED
    calls = {
        "dtype": (TypeError, "float16", (current, None, jnp.float16), {}),
        "scale_inv": (ValueError, "given", (current,), {"scale_inv": np.ones(())}),
    }
    for argument, (error, says, call, more) in calls.items():
        refuses(
            error,
            lambda x, call=call, more=more: quantize_reference(x, *call, **more),
            _of((4, 64)),
            op="quantize",
            argument=argument,
            says=(says,),
        )
    refuses(
        ValueError,
        lambda x: quantize_reference(x, delayed, scale_inv=np.ones((4, 1))),
        _of((4, 64)),
        op="quantize",
        argument="scale_inv",
        says=("(4, 1)",),
    )


@pytest.mark.parametrize("mode", [BLOCK, MX], ids=str)
def test_quantize_scales_have_the_shape_that_the_rule_says(mode):
    for shape in ((3, 1376), (3, 48), (3, 33), (3, 1), (3, 128)):
        got = jax.eval_shape(lambda x: quantize(x, mode), _of(shape))
        assert got.scale_inv.shape == scale_shape(shape, MODES[mode])
