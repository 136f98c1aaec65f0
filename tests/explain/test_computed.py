"""How a product is computed on a device, as the report has it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes

RECIPES = so.recipes


@pytest.mark.parametrize(
    "recipe, shape, said",
    [
        (RECIPES.CurrentScaling(), (64, 256), "on sm_90 FP8 tensor cores, one scale"),
        (RECIPES.CurrentScaling(), (64, 120), "k is padded from 120 to 128"),
        (RECIPES.Block128Scaling(), (64, 256), "on sm_90 FP8 tensor cores, scales of 128 elements"),
        (RECIPES.MXFP8Scaling(), (64, 256), "sm_90 has no MXFP8 tensor cores, so in bfloat16"),
    ],
)
def test_report_says_how_a_scaled_product_is_computed(recipe, shape, said):
    """By its shard: 120 over two devices is gathered, 256 is not."""
    with meshes.entered("explicit", {"tp": 2}) as mesh:
        put = meshes.place

        def quantised(x, role, layout):
            return so.quantize(x, recipe.quantizer(role, layout=layout)).detach()

        x = put(mesh, jnp.ones(shape), None, "tp")
        w = put(mesh, jnp.ones((shape[1], 128)), "tp", None)
        program = jax.jit(
            lambda x, w: so.gemm(
                quantised(x, "input", "rows"), quantised(w, "kernel", "both"), out_sharding=P()
            )
        )
        report = so.explain(program, compare=False)(x, w)
    product = report.entries[-1]
    assert product.name == "gemm"
    assert product.computed is not None
    assert said in product.computed
    assert product.computed.count("sm_90") == 1
    assert said in str(report)
    assert said in report.to_html()
    assert [e.computed for e in report.entries[:-1]] == [None] * (len(report.entries) - 1)


@pytest.mark.parametrize(
    "shapes, contracting, said",
    [
        (((8, 1024), (1024, 24)), ((1,), (0,)), None),
        (((1024, 8), (24, 1024)), ((0,), (1,)), None),
        (((8, 4, 4, 256), (4, 256, 24)), ((1, 3), (0, 1)), "from a transposed copy of lhs"),
        (((8, 24), (5, 24)), ((1,), (1,)), None),
        (
            ((4096, 4098), (4098, 4096)),
            ((1,), (0,)),
            "padded for aligned rows: k from 4098 to 4104",
        ),
        (((8, 0), (0, 24)), ((1,), (0,)), None),
        (((4096, 32), (32, 4096)), ((1,), (0,)), "by the kernel gemm_flat"),
        (((16, 8), (24, 16)), ((0,), (1,)), "by the kernel gemm_small"),
    ],
)
def test_report_says_what_a_product_copies(shapes, contracting, said):
    with meshes.entered("explicit", {"tp": 2}) as mesh:
        whole = jax.NamedSharding(mesh, P())
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=whole) for s in shapes)
        program = jax.jit(lambda x, w: so.gemm(x, w, contracting_dims=contracting))
        report = so.explain(program, compare=False)(x, w)
    # Newer versions of JAX leave no entry of a product of nothing.
    nothing = any(0 in shape for shape in shapes)
    assert [e.computed for e in report.entries] in ([[said], []] if nothing else [[said]])
    assert said is None or said in str(report)
