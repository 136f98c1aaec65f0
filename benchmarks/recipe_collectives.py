"""Writes docs/recipe-collectives.md: what layers move and keep under each recipe and preset.

    python -m benchmarks.recipe_collectives [--out FILE]

Compiles the layers of tests/layers_flax/recipe_programs.py for four virtual CPU devices and reads
the collectives of the compiled programs; nothing runs.
"""

import argparse
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Sequence

import jax

from shardops import hlo
from shardops.hlo import Collective
from tests.layers_flax.recipe_programs import (
    HEAD,
    HEADS,
    ITEMSIZES,
    LAYERS,
    PRESETS,
    D,
    F,
    Pass,
    Passes,
    S,
    passes,
)

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = (None, "delayed", "current", "block", "mxfp8")
SCALE_BYTES = {"block": 4, "mxfp8": 1}
TITLES = {
    "tp": "Tensor parallel",
    "tp+sp": "Tensor and sequence parallel",
    "fsdp": "FSDP",
    "fsdp x tp": "FSDP, tensor and sequence parallel",
}
LETTERS = {"all-gather": "g", "reduce-scatter": "s", "all-reduce": "r", "all-to-all": "a"}

HEADING = """\
# What layers move under each recipe

Command: `make collectives`. Date: {date}. JAX {jax}, bfloat16, four virtual CPU devices.

Each layer is compiled, forward and backward apart, and its collectives are read from the compiled
programs. KB are those that one device receives under ring algorithms, as in
[What everyday layouts move](collectives.md), with a byte an element of what is quantised and two of
bfloat16: the CPU compiler moves 8-bit floats as 16-bit ones, and bfloat16 as float32.

- First forward, then backward. *Data*: 8-bit operands. *Scales*: of blocks, in collectives of their
  own beside those of their data. *16 bits*: partial sums, and without a recipe all that moves.
- Counts: g all-gathers, s reduce-scatters, r all-reduces, a all-to-alls.
- *Kept*: MB between the passes, on a device; some of it the arguments.
- `kept`: the gathered input is kept (`keep_gathered`, `input_sharding`).
- Left out: the all-reduces of the largest magnitudes, a few numbers each, and that of the gradients
  of norms' parameters.

Sequences of {S}, d {D}, f {F}, {HEADS} heads of {HEAD}; tensor parallel one sequence on four
devices, FSDP {fsdp} on four, both {both} on 2 x 2. Axes are Explicit. Programs of a
TransformerLayer on Auto axes that move anything else: {others} of {programs}.
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "recipe-collectives.md")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    tables, others, programs = "", [], 0
    for preset, title in TITLES.items():
        tables += f"\n## {title}\n\n{TABLE}"
        for layer in LAYERS:
            for recipe in RECIPES:
                found = passes(layer, preset, "explicit", recipe)
                tables += row(layer, recipe, found)
                if layer == "TransformerLayer":
                    programs += 1
                    if cells(recipe, passes(layer, preset, "auto", recipe)) != cells(recipe, found):
                        others.append(f"{preset} {recipe}")
        if preset == "tp+sp":
            for recipe in RECIPES:
                found = passes("TransformerLayer", preset, "explicit", recipe, keep_gathered=True)
                tables += row("TransformerLayer, kept", recipe, found)
    head = HEADING.format(
        date=time.strftime("%Y-%m-%d"),
        jax=jax.__version__,
        S=S,
        D=D,
        F=F,
        HEADS=HEADS,
        HEAD=HEAD,
        fsdp=PRESETS["fsdp"][2],
        both=PRESETS["fsdp x tp"][2],
        others=", ".join(others) or "0",
        programs=programs,
    )
    options.out.write_text(head + tables + NOTES)
    print(f"on Auto axes otherwise: {others or 'none'}")
    return 0


TABLE = """\
| layer | recipe | data | scales | 16 bits | KB | data | scales | 16 bits | KB | kept |
|---|---|---|---|---|---|---|---|---|---|---|
"""
NOTES = """
## What follows

- A gather moves half the bytes that it does without a recipe, and scales: of blocks of 1 x 128 and
  of MXFP8 3 % more, of 128 x 128 next to nothing.
- Partial sums cross in the dtype of the result, as without a recipe: 8-bit numbers have no sum of
  8 bits. Under tensor parallelism alone, which moves nothing else, a recipe changes nothing.
- A cotangent of blocks that is gathered moves twice, as rows and as columns: their 8-bit numbers
  differ, since a block lies along the rows of either. That is as many bytes as one gather in
  bfloat16, and scales. Quantising the columns from the gathered rows would move half, and round
  twice: other numbers than on one device.
- For the same reason a kept input of blocks saves no byte between the passes: forward moves the
  columns too, and backward does not. Under `jax.checkpoint` with `save_gathered` neither is
  gathered again.
- These tokens and features let every product move what its preset says. With more tokens a product
  back into the stream moves fewer bytes by gathering its kernel:
  [Where tokens are many](presets.md#where-tokens-are-many).
"""


def row(layer: str, recipe: str | None, found: Passes) -> str:
    return f"| {layer} | {recipe or 'none'} | {' | '.join(cells(recipe, found))} |\n"


def cells(recipe: str | None, found: Passes) -> list[str]:
    """What a row of the table says of both passes."""
    of_both = (*of_pass(recipe, found.forward), *of_pass(recipe, found.backward))
    return [*of_both, f"{found.kept / 2**20:.2f}"]


def of_pass(recipe: str | None, one: Pass) -> list[str]:
    sizes = (1, SCALE_BYTES.get(recipe or "", 0), 2)
    parts = (one.data, one.scales, one.wide)
    received = sum(
        hlo.received_bytes(c) / ITEMSIZES[c.dtype] * size
        for part, size in zip(parts, sizes, strict=True)
        for c in part
    )
    return [*map(counted, parts), f"{received / 1024:.0f}"]


def counted(collectives: Sequence[Collective]) -> str:
    counts = Counter(c.kind for c in collectives)
    return " ".join(f"{n}{LETTERS[kind]}" for kind, n in sorted(counts.items())) or "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
