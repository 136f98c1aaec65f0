"""What a transformer layer moves under each recipe: counts and bytes of both passes, exactly.

Beside the same layer without a recipe (`test_layer_collectives.py`) gathers move 8-bit data, half
the bytes, and scales of blocks apart from them; partial sums cross in 16 bits, as they do there.
Nothing is computed: programs are lowered for shapes, and read.
"""

import collections

import pytest

from tests.fuzz.amount import EXHAUSTIVE
from tests.layers.eight_bits import RECIPES
from tests.layers_flax.recipe_programs import (
    BLOCKS,
    HEAD,
    HEADS,
    PRESETS,
    D,
    F,
    S,
    elements,
    inside_shard_map,
    passes,
)

KERNELS = D * HEADS * HEAD * 4 + D * F * 2  # elements

EVERY = [
    (p, k, r, False)
    for p in PRESETS
    if p != "dp x tp+sp"
    for k in ("auto", "explicit")
    for r in RECIPES
]
EVERY += [("tp+sp", "explicit", recipe, True) for recipe in RECIPES]
SOME = [
    ("tp", "auto", "current", False),
    ("tp+sp", "auto", "current", False),
    ("tp+sp", "explicit", "delayed", False),
    ("tp+sp", "auto", "block", False),
    ("tp+sp", "explicit", "mxfp8", False),
    ("tp+sp", "explicit", "current", True),
    ("fsdp", "explicit", "block", False),
    ("fsdp", "auto", "mxfp8", False),
    ("fsdp x tp", "auto", "delayed", False),
    ("fsdp x tp", "explicit", "block", False),
]


def summed(found):
    """{kind: (count, elements)}"""
    totals = collections.defaultdict(lambda: (0, 0))
    for c in found:
        count, size = totals[c.kind]
        totals[c.kind] = (count + 1, size + elements(c))
    return dict(totals)


def wanted(preset, recipe, kept):
    """Of both passes {kind: (count, elements)} of 8-bit data, of scales and of sums."""
    rules, sizes, batch = PRESETS[preset]
    fsdp, tp = sizes.get("fsdp", 1), sizes.get("tp", 1)
    # Elements of the stream, of the devices of a group along tp together.
    stream = batch * S // (fsdp * sizes.get("dp", 1)) * D
    cut = dict(rules)["sequence"] is not None
    kernels = (4, KERNELS // tp) if fsdp > 1 else (0, 0)
    block = BLOCKS.get(recipe)
    layouts = 1 if block is None else 2  # rows and columns are other numbers in blocks
    # Inputs of the products into heads and hidden features; backward these once more, and the
    # cotangents of the two products back into the stream.
    times = (2 * layouts, 2 * layouts) if kept else (2, 2 + 2 * layouts)
    for backward, n in enumerate(times if cut else (0, 0)):
        data = (n + kernels[0], n * stream + kernels[1])
        scales = (0, 0)
        if block is not None:
            of_kernel = block**2 if recipe == "block" else block
            scales = (data[0], n * stream // block + kernels[1] // of_kernel)
        scattered = (
            2 * cut + backward * kernels[0],
            2 * cut * stream // tp + backward * kernels[1] // fsdp,
        )
        summed_up = (2, 2 * stream) if tp > 1 and not cut else (0, 0)
        yield tuple(
            {kind: total for kind, total in totals.items() if total[0]}
            for totals in (
                {"all-gather": data},
                {"all-gather": scales},
                {"reduce-scatter": scattered, "all-reduce": summed_up},
            )
        )


@pytest.mark.parametrize(("preset", "kind", "recipe", "kept"), EVERY if EXHAUSTIVE else SOME)
def test_each_recipe(preset, kind, recipe, kept):
    """As many gathers and scatters as without a recipe, and for blocks a gather of scales beside
    each, and one more of each cotangent. Apart from these the maxima, and norms' parameters."""
    options = {"keep_gathered": True} if kept else {}
    found = passes("TransformerLayer", preset, kind, recipe, **options)
    for one, want in zip(
        (found.forward, found.backward), wanted(preset, recipe, kept), strict=True
    ):
        assert (summed(one.data), summed(one.scales), summed(one.wide)) == want


@pytest.mark.parametrize("recipe", RECIPES if EXHAUSTIVE else ["delayed"])
def test_inside_shard_map(recipe):
    """Manual over dp, Auto axes within: along tp what both passes move elsewhere; over dp one sum
    of all gradients."""
    found = inside_shard_map(recipe)
    for one, (forward, backward) in zip(
        (found.data, found.scales, found.wide),
        zip(*wanted("dp x tp+sp", recipe, False), strict=True),
        strict=True,
    ):
        totals = {
            kind: (forward[kind][0] + backward[kind][0], forward[kind][1] + backward[kind][1])
            for kind in forward
        }
        assert summed([c for c in one if c.groups == 4]) == totals
    over_dp = summed([c for c in found.wide if c.groups == 2])
    assert over_dp == {"all-reduce": (1, KERNELS // 4 + 2 * D)}
