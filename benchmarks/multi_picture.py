"""Draws how products and layers scale with the devices: what `multi.py` measured."""

import pathlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def draw(rows: Sequence[Any], folder: pathlib.Path) -> None:
    """TFLOP/s of all devices, forward and backward: strong scaling beside weak."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    for axes, scaling in zip(panels, ("strong", "weak"), strict=True):
        for name, points in sorted(lines(rows, scaling).items()):
            if len(points) > 1:
                style = "-" if name.startswith("layer") else "--"
                axes.plot(*zip(*sorted(points.items()), strict=True), style, marker="o", label=name)
        counts = sorted({r.devices for r in rows})
        axes.set(xlabel="GPUs", title=f"{scaling} scaling", xticks=counts)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("TFLOP/s of all GPUs, forward and backward")
    figure.savefig(folder / "scaling.png", dpi=110)
    pyplot.close(figure)


def lines(rows: Sequence[Any], scaling: str) -> dict[str, dict[int, float]]:
    """TFLOP/s by devices, of each line of a panel.

    On one device all layouts are the same product, and all presets the same layer. On two, weak
    scaling has grown from halves of the product to the whole: strong scaling's.
    """
    out: dict[str, dict[int, float]] = defaultdict(dict)
    both = [r for r in rows if r.direction != "forward"]
    names = {(r.name, r.operands) for r in both if r.devices > 1}
    for name, operands in names:
        layer = name.startswith("layer")
        for r in both:
            if r.operands != operands or r.name.startswith("layer") != layer:
                continue
            shared = r.devices == 1 and (layer or r.scaling == scaling)
            grown = not layer and scaling == "weak" and r.devices == 2
            if shared or (r.name == name and (r.scaling == scaling or grown)):
                out[f"{name}, {operands}"][r.devices] = r.rate
    return out
