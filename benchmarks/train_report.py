"""What `train.py` saved, as a table, a list of kernels and a picture."""

import pathlib
import statistics
from typing import Any

RUNS = ("none", "delayed", "current", "block128", "flax")
LABELS = {"none": "bfloat16", "flax": "bfloat16, Flax's layers and XLA"}
ALLOWED_HELD_OUT = 0.02  # above bfloat16
SMOOTHED = 20  # steps


def step_seconds(run: Any) -> float:
    """Of the blocks after the first, in which kernels are loaded."""
    return statistics.median(run["block_seconds"][1:] or run["block_seconds"])


def table(facts: Any) -> bool:
    """Print a line a run; whether all ran and every recipe is near bfloat16."""
    runs, tokens = facts["runs"], facts["batch"] * facts["seq"]
    wide = runs.get("none", {}).get("held_out")
    near = True
    print("| run | parameters | steps | held-out loss | to bfloat16 | ms a step (range) | tokens/s "
          "| temporaries, GB | peak, GB | traced, compiled, s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, run in runs.items():
        apart = None if wide is None else run["held_out"] / wide - 1
        near = near and (apart is None or apart <= ALLOWED_HELD_OUT)
        ms = 1e3 * step_seconds(run)
        low, high = (1e3 * f(run["block_seconds"][1:] or [ms / 1e3]) for f in (min, max))
        peak = "–" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 1e9:.2f}"
        print(
            f"| {LABELS.get(name, name)} | {run['parameters']:,} | {len(run['losses'])} "
            f"| {run['held_out']:.4f} | {'–' if apart is None else f'{apart:+.2%}'} "
            f"| {ms:.2f} ({low:.2f} to {high:.2f}) | {tokens / ms * 1e3:,.0f} "
            f"| {run['temporary_bytes'] / 1e9:.2f} | {peak} "
            f"| {run['trace_seconds']:.1f}, {run['compile_seconds']:.1f} |"
        )
    return near and {*runs} == {*facts["asked"]}


def list_kernels(facts: Any, count: int) -> None:
    for name, run in facts["runs"].items():
        kernels = sorted(run.get("kernels", {}).items(), key=lambda item: -item[1][1])
        if not kernels:
            print(f"{name}: was run without --kernels")
            continue
        total = sum(time for _, (_, time) in kernels)
        print(f"{name}: {sum(runs for _, (runs, _) in kernels):.0f} kernels, {total:.0f} µs a step")
        for kernel, (runs, of_kernel) in kernels[:count]:
            print(f"    {of_kernel:9.1f} {runs:7.1f}  {kernel[:100]}")


def draw(facts: Any, out: pathlib.Path) -> None:
    """The curves, and below them how far each is from bfloat16."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = facts["runs"]
    figure, (curves, apart) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    wide = np.array(runs["none"]["losses"]) if "none" in runs else None
    colors = dict(zip(RUNS, ("0.5", "tab:orange", "tab:green", "tab:blue", "black"), strict=True))
    for name, run in runs.items():
        losses = np.array(run["losses"])
        steps = np.arange(1, len(losses) + 1)
        style: Any = {"color": colors[name], "linestyle": ":" if name == "flax" else "-"}
        label = f"{LABELS.get(name, name)}: {run['held_out']:.3f}"
        curves.plot(steps, losses, linewidth=1, label=label, **style)
        if wide is not None and name != "none":
            window = min(SMOOTHED, len(losses))
            ratio = losses / wide[: len(losses)] - 1
            smooth = np.convolve(ratio, np.ones(window) / window, "valid")
            apart.plot(steps[window - 1 :], 100 * smooth, linewidth=1, **style)
    curves.set(ylabel="training loss, nats a character")
    curves.legend(title="held-out loss", fontsize=8, frameon=False)
    apart.axhline(0, color="black", linewidth=0.8)
    apart.set(xlabel="step", ylabel=f"to bfloat16, %, mean of {SMOOTHED} steps")
    for axes in (curves, apart):
        axes.grid(color="0.9")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} KB")
