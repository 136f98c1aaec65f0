"""`so.quantize` on every route: the bits of one device, where results lie, what moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from shardops.rules.quantize import Blocks, plan_quantize
from tests import meshes
from tests.quantize.quantisers import LAYOUTS, RECIPES, ROLES, bits, wide_range

ROWS, H = 256, 1024
SPECS = [("dp", "tp"), (None, ("tp", "dp")), (("dp", "tp"),)]
each_recipe = pytest.mark.parametrize("name", RECIPES)


def same(got, want, what=""):
    """On every device: a replica that differs would hide behind the first one."""
    assert jax.tree.structure(got) == jax.tree.structure(want), what
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        other = np.asarray(other)
        for shard in one.addressable_shards:
            piece = other[shard.index]
            assert np.asarray(shard.data).tobytes() == piece.tobytes(), (what, shard.device)


@each_recipe
def test_bits_of_one_device_and_what_moves(rng, any_mesh, name):
    """An outlier that one shard alone sees; whole blocks: nothing but the largest magnitude."""
    x = wide_range(rng, (ROWS, H))
    x[0, 0] = 1e6
    moves = {"delayed": {"all-reduce": (1, 4)}, "current": {"all-reduce": (1, 8)}}.get(name, {})
    for n, spec in enumerate(SPECS[:2]):
        quantizer = RECIPES[name].quantizer(ROLES[n], "both")
        want = jax.jit(so.quantize)(x, quantizer)
        placed = meshes.place(any_mesh, x, *spec)
        f = jax.jit(so.quantize)
        same(f(placed, quantizer), want, spec)
        found = hlo.collectives(f.lower(placed, quantizer).compile())
        if len({*any_mesh.axis_types}) == 1:
            assert hlo.summary(found) == moves, spec
            assert all(hlo.asked_by(c) == "shardops.quantize" for c in found)
        elif n == 0:  # one all-reduce over each kind of axis
            assert {c.kind for c in found} == ({"all-reduce"} if moves else set())
            assert all(c.bytes <= 8 for c in found)


def quantize_all(xs, quantizers):
    """In one program, which compiles faster than one for each."""
    return jax.jit(lambda xs, qs: [so.quantize(x, q) for x, q in zip(xs, qs, strict=True)])(
        xs, quantizers
    )


def zeros_in_part():
    x = np.ones((8, 64, 128), np.float32)
    x[:, 32:] = 0
    x[:, :, 5] = 1e-37
    return x


def in_each_layout(name):
    return [RECIPES[name].quantizer(layout=layout) for layout in LAYOUTS]


@functools.cache
def zeros_on_one_device(name):
    """The same for every mesh."""
    return quantize_all([zeros_in_part()] * len(LAYOUTS), in_each_layout(name))


@each_recipe
def test_zeros_where_shards_cut_blocks(any_mesh, name):
    """XLA may move scales by sums in float32: the smallest of them must survive that."""
    want = zeros_on_one_device(name)
    specs = [spec for spec in (("dp", "tp"), (None, None, ("dp", "tp"))) for _ in LAYOUTS]
    got = quantize_all(
        [meshes.place(any_mesh, zeros_in_part(), *spec) for spec in specs], 2 * in_each_layout(name)
    )
    for one, other, spec in zip(got, 2 * want, specs, strict=True):
        same(one, other, spec)


@each_recipe
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_on_two_devices(rng, name, kind):
    x = wide_range(rng, (64, 512))
    quantizer = RECIPES[name].quantizer("input", "both")
    want = jax.jit(so.quantize)(x, quantizer)
    with meshes.entered(kind, {"tp": 2}) as mesh:
        for spec in (("tp",), (None, "tp")):
            same(jax.jit(so.quantize)(meshes.place(mesh, x, *spec), quantizer), want, spec)


@pytest.mark.parametrize("name", ["block", "mxfp8"])
@pytest.mark.parametrize("shape", [(256, 1376), (96, 512)], ids=str)
def test_shards_that_break_a_block(rng, mesh, name, shape):
    """1376 over 8 devices is 172 elements, 96 rows over 2 are 48: gathered, then cut again."""
    x = wide_range(rng, shape)
    for role, layout in (("input", "rows"), ("kernel", "both")):
        quantizer = RECIPES[name].quantizer(role, layout)
        want = jax.jit(so.quantize)(x, quantizer)
        for spec in (("dp", "tp"),):
            got = jax.jit(so.quantize)(meshes.place(mesh, x, *spec), quantizer)
            same(got, want, (role, spec))
            assert meshes.same(got.data.sharding.spec, P(*spec))


def test_a_broken_block_gathers_its_dim_alone(explicit_mesh):
    """48 of 192 columns on a device: they are gathered over tp; rows stay."""
    quantizer = RECIPES["mxfp8"].quantizer()
    x = meshes.place(explicit_mesh, jnp.ones((64, 192)), "dp", "tp")
    compiled = jax.jit(so.quantize).lower(x, quantizer).compile()
    assert hlo.summary(compiled) == {"all-gather": (1, 4 * 32 * 192)}


def test_where_results_lie(rng, mesh):
    x = meshes.place(mesh, wide_range(rng, (ROWS, H)), "dp", "tp")
    for name in RECIPES:
        out = jax.jit(so.quantize)(x, RECIPES[name].quantizer("input", "both"))
        assert meshes.same(out.data.sharding.spec, P("dp", "tp"))
        assert meshes.same(out.transposed_data.sharding.spec, P("tp", "dp"))
        if out.block is None:
            assert meshes.same(out.scale_inv.sharding.spec, P())
            assert meshes.same(out.amax.sharding.spec, P())
        else:
            assert meshes.same(out.scale_inv.sharding.spec, P("dp", "tp"))
            assert meshes.same(out.transposed_scale_inv.sharding.spec, P("tp", "dp"))


def test_nan_of_one_shard_reaches_amax(rng, mesh):
    x = wide_range(rng, (8, 64))
    x[5, 60] = np.nan
    for name in ("delayed", "current"):
        out = jax.jit(so.quantize)(meshes.place(mesh, x, "dp", "tp"), RECIPES[name].quantizer())
        for shard in out.amax.addressable_shards:
            assert np.isnan(np.asarray(shard.data))
        assert np.isfinite(np.asarray(out.scale_inv))


@each_recipe
def test_inside_shard_map_the_array_is_the_shard(rng, name):
    """Blocks: the bits of the whole. One scale: that of each shard, but for the delayed one."""
    x = wide_range(rng, (8, 64, 128))
    quantizer = RECIPES[name].quantizer("input", "both")
    want = [so.quantize(jnp.asarray(one), quantizer) for one in x]
    for check_vma in (True, False):
        with meshes.entered("auto", {"dp": 8}) as mesh:

            def body(x):
                out = so.quantize(x[0], quantizer)
                return jax.tree.map(lambda a: a[None], out)

            f = jax.shard_map(
                body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=check_vma
            )
            if name == "delayed" and check_vma:  # its scale is the quantiser's, no shard's own
                continue
            got = jax.jit(f)(x)
        for n, one in enumerate(want):
            assert bits(jax.tree.map(lambda a, n=n: np.asarray(a)[n], got)) == bits(one)


@each_recipe
def test_vmap_is_each_entry_by_itself(rng, put, name):
    x = wide_range(rng, (4, 8, 96)) * np.float32([1, 10, 100, 1000])[:, None, None]
    quantizer = RECIPES[name].quantizer("input", "both")
    each = [so.quantize(jnp.asarray(one), quantizer) for one in x]
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    got = jax.jit(jax.vmap(so.quantize, (0, None)))(put(x, None, "dp"), quantizer)
    assert bits(got) == bits(want)
    assert got.shape == x.shape
    back = np.asarray(got.dequantize())
    np.testing.assert_array_equal(back, np.stack([np.asarray(e.dequantize()) for e in each]))
    quantizer = RECIPES[name].quantizer("input", "columns")
    columns = jax.vmap(so.quantize, (0, None))(jnp.asarray(x), quantizer)
    assert columns.shape == x.shape
    np.testing.assert_array_equal(
        np.asarray(columns.dequantize()),
        np.moveaxis(np.asarray(got.transposed.dequantize()), 1, -1),
    )


@each_recipe
def test_explain_says_what_moves(explicit_mesh, name):
    """The largest magnitude alone; sizes and formats of data and scales."""
    x = meshes.place(explicit_mesh, jnp.ones((8, 2, 256)), "dp", None, "tp")
    quantizer = RECIPES[name].quantizer("input", "rows")
    numbers = {"delayed": 1, "current": 2}.get(name, 0)

    def norm(x):
        return so.rms_norm(x, jnp.ones(256), quantizer=quantizer).detach()

    def both(x):
        scaled = jax.vmap(so.quantize, (1, None))(x, quantizer)
        return so.quantize(x, quantizer).detach(), scaled.detach(), norm(x)

    report = so.explain(both)(x)
    steps = [s for entry in report.entries for s in entry.steps if s.array == "amax"]
    assert len(steps) == 3 * (numbers > 0)
    if steps:
        assert steps[0].axes == ("dp", "tp")
        each = 2 * 4 * numbers * 7 / 8  # and twice that of two entries
        assert sorted(s.bytes for s in steps) == [each, each, 2 * each]
    text = str(report)
    assert "data" in text
    assert "float8_e4m3fn[" in text
    if name == "mxfp8":
        assert "float8_e8m0fnu[" in text


# --- drawn cases --------------------------------------------------------------------------------


@st.composite
def calls(draw):
    rank = draw(st.integers(2, 3))
    shape = tuple(draw(st.sampled_from([8, 16, 32, 48, 96, 128, 256])) for _ in range(rank))
    seed = draw(st.integers(0, 2**31))
    spec = meshes.random_spec(np.random.default_rng(seed), shape, meshes.SIZES)
    name, role = draw(st.sampled_from([*RECIPES])), draw(st.sampled_from(ROLES))
    return shape, spec, name, role, draw(st.sampled_from(LAYOUTS)), seed


@settings(max_examples=8)
@given(calls(), st.sampled_from(["auto", "explicit", "explicit-auto", "auto-explicit"]))
def test_drawn_calls_give_the_bits_of_one_device(call, kind):
    shape, spec, name, role, layout, seed = call
    x = wide_range(np.random.default_rng(seed), shape)
    quantizer = RECIPES[name].quantizer(role, layout)
    want = jax.jit(so.quantize)(x, quantizer)
    with meshes.entered(kind) as mesh:
        same(jax.jit(so.quantize)(meshes.place(mesh, x, *spec), quantizer), want, call)


@settings(max_examples=300)
@given(calls())
def test_drawn_plans_keep_blocks_whole_and_gather_no_more(call):
    """Each dim has the longest prefix of its axes that leaves its blocks whole."""
    shape, spec, name, role, layout, _ = call
    blocks = Blocks(layout, RECIPES[name].quantizer(role).block)
    sizes = dict(meshes.SIZES)
    plan = plan_quantize(shape, spec, tuple(sizes.items()), blocks, 1)
    for d, unit in enumerate(blocks.units(len(shape))):
        kept = plan.x[d]
        assert spec[d][: len(kept)] == kept
        parts = int(np.prod([sizes[a] for a in kept], initial=1))
        assert not kept or shape[d] % (parts * unit) == 0
        if kept != spec[d]:
            assert shape[d] % (parts * sizes[spec[d][len(kept)]] * unit)
    assert plan.rows == spec
    assert {s.kind for s in (*plan.row_steps, *plan.column_steps)} <= {"slice"}
    assert {*plan.amax_axes} == {a for d in plan.x for a in d}
