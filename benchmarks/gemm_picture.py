"""Draws the rates of products beside XLA's and torch's.

    python benchmarks/gemm_picture.py GEMM.json [--out docs/_static/products.png]

From what `gemm_times.py --json` saves. `make products` measures and draws.
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

from gemm_times import CONTENDERS, MODES

OUT = pathlib.Path("docs/_static/products.png")
TITLES = {
    "bfloat16": "bfloat16",
    "tensor": "8 bits, one scale a tensor",
    "block_128": "8 bits, scales of 1×128 and 128×128",
}
COLORS = dict(zip(CONTENDERS, ("#0b6e99", "#4d7c0f", "#c1440e", "#6b3fa0"), strict=True))

# Of a panel: TFLOP/s of each round by contender, by m×n×k.
Rates = dict[str, dict[str, list[float]]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE.png")
    options = parser.parse_args(arguments)
    panels: dict[str, Rates] = defaultdict(dict)
    for (m, n, k, mode), times in json.loads(options.file.read_text()):
        panels[mode][f"{m}×{n}×{k}"] = {
            name: [2e-6 * m * n * k / t for t in of] for name, of in times.items()
        }
    draw({mode: panels[mode] for mode in MODES if mode in panels}, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} KB")
    return 0


def draw(panels: dict[str, Rates], out: pathlib.Path) -> None:
    matplotlib.use("Agg")
    heights = [len(rates) for rates in panels.values()]
    figure, all_axes = pyplot.subplots(
        len(panels), 1, figsize=(8, 0.42 * sum(heights) + 1.6), height_ratios=heights, squeeze=False
    )
    for axes, (mode, rates) in zip(all_axes[:, 0], panels.items(), strict=True):
        draw_panel(axes, TITLES[mode], rates)
    all_axes[0, 0].legend(
        fontsize=8, loc="lower right", ncols=4, bbox_to_anchor=(1, 1), frameon=False
    )
    all_axes[-1, 0].set_xlabel("TFLOP/s, median of the rounds; lines: least and most")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    # No version of the drawing library in the file: the same figures give the same bytes longer.
    figure.savefig(out, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def draw_panel(axes: Axes, title: str, rates: Rates) -> None:
    height = 0.8 / len(CONTENDERS)
    for i, name in enumerate(CONTENDERS):
        rows = [(row, of[name]) for row, of in enumerate(rates.values()) if name in of]
        if not rows:
            continue
        medians = [statistics.median(of) for _, of in rows]
        reach = [
            [median - min(of) for median, (_, of) in zip(medians, rows, strict=True)],
            [max(of) - median for median, (_, of) in zip(medians, rows, strict=True)],
        ]
        places = [row + (i - (len(CONTENDERS) - 1) / 2) * height for row, _ in rows]
        axes.barh(places, medians, height, xerr=reach, color=COLORS[name], label=name,
                  error_kw={"linewidth": 0.8})  # fmt: skip
    axes.set_yticks(range(len(rates)), rates, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
