"""A quantisation of a norm's result becomes the norm's `quantizer`, where it can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.kernels.target import target_for, use_target
from tests import meshes
from tests.fuse.programs import assert_same, draw, kinds

ROWS, DIM = 64, 256
RECIPES = {
    "delayed": so.recipes.DelayedScaling(),
    "block": so.recipes.Block128Scaling(),
    "mxfp8": so.recipes.MXFP8Scaling(),
}


def scaled(x, gamma, quantizer):
    """A quantised norm of a sum that goes on, as one writes it."""
    h = x + 2 * x
    y = so.quantize(so.rms_norm(h, gamma), quantizer)
    return h, y


def used(x, gamma, w, quantizer):
    h, y = scaled(x, gamma, quantizer)
    return h, so.gemm(y, w), y.dequantize()


@pytest.fixture
def arrays(rng):
    return draw(rng, ROWS, DIM) * ROWS**0.5, 1 + draw(rng, DIM) / 8, draw(rng, DIM, 128)


@pytest.mark.parametrize("layout", ["rows", "both"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("one_device")
def test_quantisation_is_the_norms(arrays, recipe, layout):
    q = RECIPES[recipe].quantizer("input", layout)
    report = assert_same(lambda x, g, w: used(x, g, w, q), *arrays)
    assert kinds(report) == {"add": 1, "quantizer": 1}
    assert report.missed == ()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("one_device")
def test_bits_are_those_of_a_norm_that_quantises(arrays, recipe, dtype):
    """In 16 bits the fused one does not round before it quantises."""
    x, gamma, _ = (a.astype(dtype) for a in arrays)
    q = RECIPES[recipe].quantizer("input")
    fused = so.fuse(lambda x, g: so.quantize(so.rms_norm(x, g), q))
    got, want = fused(x, gamma), so.rms_norm(x, gamma, quantizer=q)
    assert kinds(fused.report) == {"quantizer": 1}
    assert jax.tree.structure(got.detach()) == jax.tree.structure(want.detach())
    for g, w in zip(jax.tree.leaves(got.detach()), jax.tree.leaves(want.detach()), strict=True):
        np.testing.assert_array_equal(g, w)


def test_one_kernel_is_launched():
    q = RECIPES["delayed"].quantizer("input")

    def f(x, gamma):
        return so.quantize(so.rms_norm(x, gamma), q).detach()

    x, gamma = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 4096), (4096,)))
    with use_target(target_for("sm_90", 132)), meshes.entered("auto", {"one": 1}):
        texts = [
            jax.jit(g).trace(x, gamma).lower(lowering_platforms=("cuda",)).as_text()
            for g in (f, so.fuse(f))
        ]
    assert [text.count("custom_call @shardops") for text in texts] == [2, 1]


@pytest.mark.parametrize(
    ("want", "fn"),
    {
        "its result is quantised by its own largest magnitude, which has to be there first": (
            lambda x, g: (
                so.quantize(so.rms_norm(x, g), so.recipes.CurrentScaling().quantizer()).data
            )
        ),
        "its result is quantised, and also returned": lambda x, g: (
            (y := so.rms_norm(x, g)),
            so.quantize(y, RECIPES["block"].quantizer()).data,
        ),
        "its result is quantised, and also used by `sin`": lambda x, g: (
            jnp.sin(y := so.rms_norm(x, g)),
            so.quantize(y, RECIPES["block"].quantizer()).data,
        ),
        "its result is quantised more than once": lambda x, g: [
            so.quantize(y, RECIPES[r].quantizer()).data
            for y in [so.rms_norm(x, g)]
            for r in ("block", "mxfp8")
        ],
        "its quantiser is made from what it normalises": lambda x, g: (
            so.quantize(
                so.rms_norm(x, g), RECIPES["delayed"].quantizer().update(jnp.max(jnp.abs(x)))
            ).data
        ),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("one_device")
def test_what_is_left_alone_is_told(arrays, want, fn):
    x, gamma, _ = arrays
    fused = so.fuse(fn)
    got = fused(x, gamma)
    assert kinds(fused.report) == {}
    assert [miss.why for miss in fused.report.missed] == [want]
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(fn(x, gamma)), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.usefixtures("one_device")
def test_a_quantisation_that_is_of_no_norm_is_no_near_miss(arrays):
    q = RECIPES["block"].quantizer()
    assert so.fuse(jax.vmap(lambda x: so.quantize(x, q).data)).explain(arrays[0]).missed == ()
    assert so.fuse(lambda x: so.quantize(x, q).data).explain(arrays[0]).missed == ()


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantisation_is_the_norms_on_a_mesh(arrays, kind, recipe):
    x, gamma, w = arrays
    q = RECIPES[recipe].quantizer("input")

    def local(x, gamma, w):
        return used(x, gamma, w, q)

    with meshes.entered("explicit" if kind == "manual" else kind, {"dp": 4, "tp": 2}) as mesh:
        fn = local
        if kind == "manual":
            rows = jax.P(("dp", "tp"), None)
            fn = jax.shard_map(local, in_specs=(rows, jax.P(), jax.P()), out_specs=rows)
        placed = meshes.place(mesh, x, ("dp", "tp"), None)
        report = assert_same(fn, placed, *(meshes.place(mesh, a) for a in (gamma, w)), wrap=jax.jit)
    assert kinds(report) == {"add": 1, "quantizer": 1}
