"""What layers move, exactly: tensor and sequence parallel, FSDP; forward and backward bodies apart.

Layers are in a `jax.lax.scan`, so that XLA shares no gather between the passes; an instruction in
a loop counts once.
"""

import collections
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import meshes
from tests.layers.eight_bits import RECIPES

B, S, D, F, LAYERS = 4, 512, 512, 2048, 3
TP = {
    "hidden_sharding": P("dp", None, "tp"),
    "out_sharding": P("dp", "tp", None),
    "batch_dims": ((0,), ()),
}


def stack(qs):
    return jax.tree.map(lambda a: jnp.stack([a] * LAYERS), qs)


def moved(mesh, layouts, recipe, *, gradient, remat=lambda f: f, pair=False, **options):
    """Collectives of layers x + mlp(x), but for those of a few numbers."""
    dims = {"x": (B, S, D), "gamma": (LAYERS, D), "up": (LAYERS, D, F), "down": (LAYERS, F, D)}
    if pair:
        dims["up"] = (LAYERS, D, 2, F)
        layouts = layouts | {"up": (None, None, None, "tp")}
    arrays = {
        name: meshes.place(mesh, jnp.zeros(shape, jnp.bfloat16), *layouts[name])
        for name, shape in dims.items()
    }
    qs = None
    if recipe is not None:
        qs = stack((RECIPES[recipe].dense_quantizers(),) * 2)
    x = arrays.pop("x")

    def loss(arrays, x, qs):
        if qs is not None:
            qs = so.recipes.watch(qs)

        @remat
        def layer(x, of_layer):
            arrays, qs = of_layer
            return x + so.layer_norm_mlp(
                x,
                arrays["gamma"],
                (arrays["up"], arrays["down"]),
                norm="rms_norm",
                activation=("silu", "linear") if pair else "gelu",
                quantizers=qs,
                **options,
            )

        out = jax.lax.scan(lambda x, w: (layer(x, w), None), x, (arrays, qs))[0]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    f = jax.grad(loss, (0, 1, 2), allow_int=True) if gradient else loss
    compiled = jax.jit(f).lower(arrays, x, qs).compile()
    return [c for c in hlo.collectives(compiled) if c.bytes > 4 * D]


def counts(found):
    return dict(collections.Counter(c.kind for c in found))


def of_data(found):
    """All-gathers of more than scales: the CPU compiler moves 8-bit floats as 16-bit ones."""
    return [c for c in found if c.kind == "all-gather" and c.dtype in ("f16", "f8e4m3fn", "f8e5m2")]


LAYOUT = {
    "x": ("dp", "tp"),
    "gamma": (),
    "up": (None, None, "tp"),
    "down": (None, "tp"),
}


@pytest.mark.parametrize("recipe", [None, "current"])
def test_sequence_parallel_mlp_forward_is_one_gather_and_one_scatter(mesh, recipe):
    found = moved(mesh, LAYOUT, recipe, gradient=False, pair=True, **TP)
    assert counts(found) == {"all-gather": 1, "reduce-scatter": 1}


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_sequence_parallel_mlp_backward_gathers_twice_or_keeps_the_input(explicit_mesh, recipe):
    """Forward 1 and 1; backward 1 and 1, and the column-parallel weight's gradient gathers x again
    unless it is kept: without `jax.checkpoint`, and under it by `save_gathered`."""
    keep = {"input_sharding": P("dp", None, None)}
    save = partial(jax.checkpoint, policy=so.checkpoint_policies.save_gathered)
    # Under jax.checkpoint the forward products are in the backward body again.
    for options, gathers in (
        ({}, 3),
        (keep, 2),
        ({**keep, "remat": save}, 2),
        ({**keep, "remat": jax.checkpoint}, 3),
    ):
        found = moved(explicit_mesh, LAYOUT, recipe, gradient=True, **options, **TP)
        assert counts(found)["all-gather"] == gathers, options
        assert all(c.groups == 4 for c in found if c.kind == "all-gather")
        if recipe is not None:
            assert len(of_data(found)) == gathers  # no gather of 16-bit or float32 numbers
        if "remat" not in options:
            assert counts(found)["reduce-scatter"] == 2


@pytest.mark.parametrize("recipe", [None, "delayed", "block"])
def test_sequence_parallel_mlp_on_auto_axes(auto_mesh, recipe):
    """The cotangent of the result is gathered once for both of its products; with blocks, whose
    layouts are other numbers, for each, and blocks bring their scales along."""
    data = {None: 3, "delayed": 3, "block": 4}[recipe]
    found = moved(auto_mesh, LAYOUT, recipe, gradient=True, pair=True, **TP)
    if recipe is not None:
        assert len(of_data(found)) == data
    scales = data if recipe == "block" else 0
    # The weights' gradients over dp are combined into one all-reduce.
    want = {"all-gather": data + scales, "reduce-scatter": 2, "all-reduce": 1}
    assert counts(found) == want


def test_sequence_parallel_mlp_of_blocks_moves_data_and_scales(explicit_mesh):
    """Rows and columns are other numbers: dz is gathered as both, each with its scales."""
    found = moved(explicit_mesh, LAYOUT, "block", gradient=True, **TP)
    assert len(of_data(found)) == 4
    assert counts(found) == {"all-gather": 8, "reduce-scatter": 2, "all-reduce": 1}


FSDP = {"x": ("dp",), "gamma": (), "up": (None, None, "dp"), "down": (None, None, "dp")}


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_fsdp_mlp_gathers_each_weight_once_a_use_and_scatters_its_gradient(recipe):
    options = {
        "hidden_sharding": P("dp", None, None),
        "out_sharding": P("dp", None, None),
        "batch_dims": ((0,), ()),
    }
    with meshes.entered("explicit", {"dp": 4}) as mesh:
        forward = moved(mesh, FSDP, recipe, gradient=False, **options)
        both = moved(mesh, FSDP, recipe, gradient=True, **options)
    assert counts(forward) == {"all-gather": 2}
    assert counts(both) == {"all-gather": 4, "reduce-scatter": 2}
    if recipe is not None:
        assert len(of_data(both)) == 4
