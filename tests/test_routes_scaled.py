"""Products of quantised operands on every route: values, and what moves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from shardops.primitives.scaled import quantize_reference
from shardops.rules.scales import scale_spec
from shardops.rules.spec import divisible, to_partition_spec, to_spec
from tests import meshes
from tests.closeness import assert_shards_close

M, K, N = 128, 256, 128
BLOCKS = {  # mode: blocks of lhs [M, K] and of rhs [K, N], along K
    so.ScalingMode.TENSOR_CURRENT: (None, None),
    so.ScalingMode.BLOCK_128: ((1, 128), (128, 128)),
    so.ScalingMode.MXFP8: ((1, 32), (32, 1)),
}
each_mode = pytest.mark.parametrize("mode", BLOCKS, ids=lambda m: m.value)


def quantised(rng, mode, m=M, k=K, n=N):
    lhs, rhs = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
    return [
        quantize_reference(jnp.asarray(a), mode, b, f)
        for a, b, f in zip(
            (lhs, rhs), BLOCKS[mode], (jnp.float8_e4m3fn, jnp.float8_e5m2), strict=True
        )
    ]


def placed(mesh, scaled, *spec):
    """Data by `spec`, scales by their own rule; on an Explicit mesh uneven data stay whole."""
    plain = divisible(scaled.shape, to_spec(spec, scaled.ndim), mesh.shape.items())
    of_scale = scale_spec(scaled.shape, plain, scaled.block, mesh.shape)

    def put(array, axes):
        return jax.device_put(array, NamedSharding(mesh, to_partition_spec(axes)))

    return so.ScaledArray(
        put(scaled.data, plain),
        put(scaled.scale_inv, of_scale),
        scaled.amax,
        scaled.mode,
        scaled.dtype,
        scaled.block,
    )


def exact(lhs, rhs):
    wide = [np.asarray(a.dequantize(jnp.float32), np.float64) for a in (lhs, rhs)]
    return wide[0] @ wide[1]


@each_mode
@pytest.mark.parametrize("kind", ["auto", "explicit", "explicit-auto", "auto-explicit"])
def test_scaled_gemm_every_layout(rng, mode, kind):
    lhs, rhs = quantised(rng, mode)
    want = exact(lhs, rhs)
    pairs = [
        ((), ("dp",)),
        (("dp",), (None, "tp")),
        ((None, "tp"), ("tp", "dp")),
        (("tp", "dp"), ()),
        ((None, ("dp", "tp")), (None, "tp")),
        (("dp",), ("dp",)),
    ]
    with meshes.entered(kind) as mesh:
        f = jax.jit(so.gemm)
        for x, w in pairs:
            got = f(placed(mesh, lhs, *x), placed(mesh, rhs, *w))
            assert_shards_close(got, want, reduced=K, what=f"{x} {w}")


@each_mode
@pytest.mark.parametrize(("k", "n"), [(96, 48), (1376, 33), (48, 8), (33, 40)])
def test_scaled_gemm_with_shards_that_break_a_block(rng, mode, k, n):
    """1376 over 8 devices is 172 elements, 96 over 2 is 48: no whole blocks of 32 or 128."""
    lhs, rhs = quantised(rng, mode, 16, k, n)
    want = exact(lhs, rhs)
    for kind in ("auto", "explicit"):
        with meshes.entered(kind) as mesh:
            for axes in ("dp", "tp", ("dp", "tp")):
                x, w = placed(mesh, lhs, None, axes), placed(mesh, rhs, axes)
                assert_shards_close(jax.jit(so.gemm)(x, w), want, reduced=k, what=f"{kind} {axes}")


def test_scaled_gemm_row_parallel_moves_the_sum_alone(rng):
    """Data and scales stay: partial sums, then one all-reduce of the result."""
    lhs, rhs = quantised(rng, so.ScalingMode.MXFP8, 32, 1024, 16)
    for kind in ("auto", "explicit"):
        with meshes.entered(kind, {"tp": 2}) as mesh:
            x, w = placed(mesh, lhs, None, "tp"), placed(mesh, rhs, "tp")
            f = jax.jit(lambda x, w: so.gemm(x, w, out_sharding=P()))
            found = hlo.summary(f.lower(x, w).compile())
            assert found == {"all-reduce": (1, 4 * 32 * 16)}
            assert_shards_close(f(x, w), exact(lhs, rhs), reduced=1024)


def test_scaled_gemm_gathers_8_bit_data_and_scales():
    """FSDP: the weight's bytes and its scales, never the dequantised weight."""
    weight = quantize_reference(
        jnp.ones((256, 128)), so.ScalingMode.BLOCK_128, (128, 128), jnp.float8_e4m3fn
    )
    for kind in ("auto", "explicit"):
        with meshes.entered(kind, {"dp": 2}) as mesh:
            x = meshes.place(mesh, jnp.ones((4096, 256), jnp.bfloat16), "dp")
            w = placed(mesh, weight, "dp")
            f = jax.jit(lambda x, w: so.gemm(x, w, out_sharding=P("dp")))
            found = hlo.collectives(f.lower(x, w).compile())
            assert {c.kind for c in found} == {"all-gather"}
            # The CPU compiler moves 8-bit floats as 16-bit ones.
            moved = {(c.dtype, c.shape) for c in found}
            assert {shape for _, shape in moved} == {(256, 128), (2, 1)}
            assert {dtype for dtype, _ in moved} <= {"f8e4m3fn", "f16", "f32"}
            assert ("f32", (256, 128)) not in moved
            assert f(x, w).dtype == jnp.float32


@each_mode
def test_scaled_gemm_inside_shard_map_and_vmap(rng, mode):
    lhs, rhs = quantised(rng, mode)
    want = exact(lhs, rhs)
    assert_shards_close(so.gemm(lhs, rhs, activation="relu"), np.maximum(want, 0), reduced=K)
    with meshes.entered("auto", {"dp": 8}) as mesh:
        of_scale = P() if mode is so.ScalingMode.TENSOR_CURRENT else P("dp")
        specs = so.ScaledArray(P("dp"), of_scale, P(), lhs.mode, lhs.dtype, lhs.block)
        if lhs.amax is None:
            specs = so.ScaledArray(P("dp"), of_scale, None, lhs.mode, lhs.dtype, lhs.block)
        f = jax.shard_map(so.gemm, mesh=mesh, in_specs=(specs, P()), out_specs=P("dp"))
        assert_shards_close(jax.jit(f)(lhs, rhs), want, reduced=K)
    both = jax.vmap(so.gemm, (0, None))(jax.tree.map(lambda a: jnp.stack([a, a]), lhs), rhs)
    assert_shards_close(both[1], want, reduced=K)


def test_scaled_gemm_refuses_other_ops_sizes_and_stacks():
    scaled = quantize_reference(jnp.ones((32, 32)), so.ScalingMode.TENSOR_CURRENT)
    with pytest.raises(NotImplementedError, match="products alone take scaled ones"):
        so.rms_norm(scaled, jnp.ones(32))
    with pytest.raises(ValueError, match="equal sizes"):
        so.gemm(scaled, jnp.ones((16, 4)))
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), scaled)
    with pytest.raises(ValueError, match=r"gemm: rhs is a stack of .*jax.vmap\(so.gemm\)"):
        so.gemm(jnp.ones((4, 2)), stack)
    with pytest.raises(ValueError, match="gemm: lhs is a ScaledArray without data"):
        so.gemm(jax.tree.map(lambda _: None, scaled), jnp.ones((32, 4)))


@pytest.mark.parametrize(
    "field, change",
    [
        ("block", {"block": (64, 64), "scale_inv": jnp.ones((2, 4))}),
        ("scale_inv", {"scale_inv": jnp.ones((1, 2))}),
        ("scale_inv", {"scale_inv": jnp.ones((128, 2), jnp.bfloat16)}),
        ("scale_inv", {"scale_inv": None}),
        ("data", {"data": jnp.ones((128, 256))}),
        ("mode", {"mode": "block_128"}),
        ("dtype", {"dtype": jnp.int32}),
    ],
)
def test_scaled_gemm_refuses_parts_that_do_not_go_together(field, change):
    right = so.quantize(jnp.ones((128, 256)), so.recipes.Block128Scaling().quantizer()).detach()
    assert so.gemm(right, right, contracting_dims=((1,), (1,))).shape == (128, 128)
    with pytest.raises(ValueError, match=rf"gemm: rhs\.{field} is"):
        so.gemm(right, replace(right, **change), contracting_dims=((1,), (1,)))


def test_vmap_over_the_other_operand_gathers_8_bit_data():
    with meshes.entered("auto", {"dp": 2}) as mesh:
        quantizer = so.recipes.CurrentScaling().quantizer("kernel")
        w = jax.device_put(jnp.ones((256, 128), jnp.bfloat16), NamedSharding(mesh, P("dp")))
        wq = jax.jit(lambda w: so.quantize(w, quantizer).detach())(w)
        x = jax.device_put(jnp.ones((4, 64, 256), jnp.bfloat16), NamedSharding(mesh, P(None, "dp")))
        f = jax.jit(jax.vmap(lambda x: so.gemm(x, wq, out_sharding=P("dp"))))
        found = [c for c in hlo.collectives(f.lower(x).compile()) if c.kind == "all-gather"]
        of_w = {c.dtype for c in found if c.shape == (256, 128)}
        assert of_w <= {"f8e4m3fn", "f16"}, found  # XLA:CPU moves 8-bit floats as 16-bit ones
        np.testing.assert_allclose(np.asarray(f(x), np.float32), 256, rtol=1e-2)
