"""Draws how products and layers scale with the devices.

    python benchmarks/multi_picture.py MULTI.json [--out docs/_static/scaling.png]

From what `multi.py --json` saves; `make bench-multi` measures and draws.
"""

import argparse
import itertools
import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import pyplot

OUT = pathlib.Path("docs/_static/scaling.png")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE.png")
    options = parser.parse_args(arguments)
    draw(json.loads(options.file.read_text())["rows"], options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} KB")
    return 0


def draw(rows: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """TFLOP/s of all devices, forward and backward: strong scaling beside weak."""
    matplotlib.use("Agg")
    panels = {scaling: lines(rows, scaling) for scaling in ("strong", "weak")}
    names = sorted({name for found in panels.values() for name in found})
    colors = dict(zip(names, itertools.cycle(pyplot.get_cmap("tab20").colors), strict=False))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    for panel, (scaling, found) in zip(axes, panels.items(), strict=True):
        for name, points in found.items():
            style = "-" if name.startswith("layer") else "--"
            counts, rates = zip(*sorted(points.items()), strict=True)
            panel.plot(counts, rates, style, marker="o", color=colors[name], label=name)
        panel.set(
            xlabel="GPUs", title=f"{scaling} scaling", xticks=sorted({r["devices"] for r in rows})
        )
        panel.legend(fontsize=7, loc="lower right")
    axes[0].set_ylabel("TFLOP/s of all GPUs, forward and backward")
    axes[0].set_ylim(bottom=0, top=1.05 * axes[0].get_ylim()[1])
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def lines(rows: Sequence[Mapping[str, Any]], scaling: str) -> dict[str, dict[int, float]]:
    """TFLOP/s by devices, of each line of a panel that has two points.

    On one device all presets are the same layer, and of strong scaling all layouts the same
    product. On two, weak scaling has grown from half a product to the whole: strong scaling's.
    """
    out: dict[str, dict[int, float]] = defaultdict(dict)
    both = [r for r in rows if r["direction"] != "forward"]
    for name, operands in sorted({(r["name"], r["operands"]) for r in both if r["devices"] > 1}):
        layer = name.startswith("layer")
        for r in both:
            if r["operands"] != operands or r["name"].startswith("layer") != layer:
                continue
            at_scaling = r["scaling"] == scaling
            if r["devices"] == 1:
                counts = layer or (at_scaling and (scaling == "strong" or r["name"] == name))
            else:
                grown = not layer and scaling == "weak" and r["devices"] == 2
                counts = r["name"] == name and (at_scaling or grown)
            if counts:
                rate = r["flops"] / r["times"]["shardops"] / 1e6
                out[f"{name}, {operands}"][r["devices"]] = rate
    return {name: points for name, points in out.items() if len(points) > 1}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
