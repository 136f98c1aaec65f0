"""Draws how near norms and softmax come to the memory's limit, over row lengths.

    python benchmarks/roofline.py NORMS.json SOFTMAX.json [--out docs/_static/roofline.png]

From what `tune.py --limit 0 --json` and `softmax_times.py --json` save; any number of files, and
either kind alone. The limit is the copy bandwidth of the run that a file is from. `make roofline`
measures and draws.
"""

import argparse
import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

OUT = pathlib.Path("docs/_static/roofline.png")
PANELS = ("norms, forward", "norms, backward", "softmax")
COLORS = ("#0b6e99", "#c1440e", "#4d7c0f", "#6b3fa0")
DASHES = ("-", "--", ":", "-.")

# Of a panel, by line: (row length, fraction of the copy bandwidth).
Lines = dict[str, list[tuple[int, float]]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=pathlib.Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE.png")
    options = parser.parse_args(arguments)
    panels: dict[str, Lines] = defaultdict(lambda: defaultdict(list))
    for path in options.files:
        for panel, line, length, fraction in points(json.loads(path.read_text())):
            panels[panel][line].append((length, fraction))
    draw({panel: panels[panel] for panel in PANELS if panels[panel]}, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} KB")
    return 0


def points(facts: Any) -> Iterator[tuple[str, str, int, float]]:
    """(panel, line, row length, fraction) of each launch that a plan chose."""
    if isinstance(facts, list):  # tune.py
        for timed in facts:
            kind, direction, *add = timed["op"].split(".")
            line = f"{kind} norm" + (", add" if add else "")
            yield f"norms, {direction}", line, timed["cols"], timed["floor"] / timed["own"]["us"]
    else:  # softmax_times.py
        for row in facts["rows"]:
            if row["chosen"]:
                line = row["direction"] + ("" if row["mask"] == "plain" else f", {row['mask']}")
                yield "softmax", line, row["keys"], row["fraction"]


def draw(panels: dict[str, Lines], out: pathlib.Path) -> None:
    matplotlib.use("Agg")
    figure, all_axes = pyplot.subplots(
        len(panels), 1, figsize=(8, 2.6 * len(panels)), sharex=True, squeeze=False
    )
    lengths = [length for lines in panels.values() for of in lines.values() for length, _ in of]
    for axes, (title, lines) in zip(all_axes[:, 0], panels.items(), strict=True):
        draw_panel(axes, title, lines)
    powers = [2**p for p in range(4, 21, 2) if min(lengths) <= 2**p <= max(lengths)]
    axes.xaxis.set_major_locator(FixedLocator(powers))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value)}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("elements of a row")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    # No version of the drawing library in the file: the same figures give the same bytes longer.
    figure.savefig(out, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def draw_panel(axes: Axes, title: str, lines: Lines) -> None:
    axes.axhline(1, color="black", linewidth=1)
    axes.annotate("copy", (1, 1), xycoords=("axes fraction", "data"), xytext=(4, -3),
                  textcoords="offset points", fontsize=8)  # fmt: skip
    names = list(dict.fromkeys(line.split(",")[0] for line in lines))
    seen: dict[str, int] = defaultdict(int)
    for line in sorted(lines):
        name = line.split(",")[0]
        at, fractions = zip(*sorted(lines[line]), strict=True)
        color, dash = COLORS[names.index(name) % 4], DASHES[seen[name] % 4]
        axes.plot(at, fractions, dash, color=color, marker=".", linewidth=1.2, label=line)
        seen[name] += 1
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("fraction of copy")
    axes.grid(color="0.9")
    axes.legend(fontsize=8, loc="lower left", ncols=2, frameon=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
