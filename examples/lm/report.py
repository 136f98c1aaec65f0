"""What the user sees: progress, tables, and the picture of the loss curves."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import shardops
from shardops import hlo

from .options import Options
from .text import Text


class Meter:
    """Loss and tokens a second: a bar on a terminal, elsewhere ten lines in all."""

    def __init__(self, console: Console, title: str, tokens_per_step: int) -> None:
        self._console, self._title, self._tokens = console, title, tokens_per_step
        self._loss, self._seconds = float("nan"), 0.0
        self._began = time.perf_counter()

    def steps(self, start: int, stop: int) -> Iterator[int]:
        """The step numbers, shown as they pass; `took` is called once within each."""
        every = max(1, (stop - start) // 10)
        with self._bar() as bar:
            task = bar.add_task(self._title, total=stop, completed=start, loss="", rate="")
            for step in range(start, stop):
                self._began = time.perf_counter()
                yield step
                speed = (step + 1 - start) * self._tokens / self._seconds
                loss, rate = f"loss {self._loss:.3f}", f"{speed:,.0f} tokens/s"
                bar.update(task, completed=step + 1, loss=loss, rate=rate)
                if not self._console.is_terminal and (step + 1 - start) % every == 0:
                    line = f"{self._title}  {step + 1}/{stop}  {loss}  {rate}"
                    self._console.print(line)

    def took(self, loss: float) -> None:
        """End of the step proper: what follows, such as a checkpoint, is not in tokens/s."""
        self._loss = loss
        self._seconds += time.perf_counter() - self._began

    def _bar(self) -> Progress:
        columns = ("{task.description}", "{task.fields[loss]}", "{task.fields[rate]}")
        description, loss, rate = (TextColumn(column) for column in columns)
        return Progress(
            description,
            BarColumn(),
            MofNCompleteColumn(),
            loss,
            rate,
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )


def header(console: Console, options: Options, mesh: Mesh, params: Any, text: Text) -> None:
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    count = sum(array.size for array in jax.tree.leaves(params))
    device, recipe = mesh.devices.flat[0], options.recipe
    lines = (
        f"shardops {shardops.__version__}, jax {jax.__version__}: "
        f"{mesh.size} x {device.device_kind}, mesh {sizes}, {options.dtype}",
        *([f"recipe {recipe}: {arithmetic(recipe, device)}"] if recipe != "none" else []),
        f"model: {count:,} parameters",
        f"text: {text.files:,} files, {len(text.train):,} characters to train on, "
        f"{len(text.held_out):,} held out",
    )
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)


# Compute capabilities whose tensor cores take a recipe's operands as they are.
_NATIVE = {
    "delayed": ((8, 9), (99, 0)),
    "current": ((8, 9), (99, 0)),
    "block128": ((9, 0), (9, 0)),
    "mxfp8": ((10, 0), (99, 0)),
}


def arithmetic(recipe: str, device: Any) -> str:
    """In what the products of a recipe are computed on this kind of device."""
    if device.platform != "gpu":
        return "8-bit operands, multiplied in float32, as this CPU has no such products"
    least, most = _NATIVE[recipe]
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    if least <= capability <= most:
        return "products of 8-bit operands"
    wide = "float32" if recipe == "block128" else "bfloat16"
    return f"8-bit operands, multiplied in {wide}, as this GPU has no such products"


def losses(console: Console, train: float, held_out: float) -> None:
    table = Table("loss", "nats a character", title="After training")
    table.columns[1].justify = "right"
    table.add_row("train", f"{train:.4f}")
    table.add_row("held out", f"{held_out:.4f}")
    console.print(table)


def collectives(console: Console, program: Any) -> None:
    """What one compiled training step moves between devices, and which op asked for it."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for one in hlo.collectives(program):
        if one.groups == 1:  # over a mesh axis of size 1: nothing moves
            continue
        key = (one.kind, hlo.asked_by(one))
        count[key] += 1
        size[key] += one.bytes
    table = Table("kind", "asked for by", title="Collectives of one training step, a device")
    for name in ("count", "result bytes"):
        table.add_column(name, justify="right")
    for key in sorted(count):
        table.add_row(*key, str(count[key]), f"{size[key]:,}")
    if count:
        table.add_section()
        table.add_row("all", "", str(count.total()), f"{size.total():,}")
    else:
        table.add_row("none", "", "0", "0")
    console.print(table)


def along_curve(console: Console, difference: float, step: int, allowed: float) -> None:
    console.print(
        f"largest relative difference of the loss curve from plain jnp on one device: "
        f"{difference:.2e}, at step {step} (allowed {allowed:.0e})",
        highlight=False,
        soft_wrap=True,
    )


def beside_plain(
    console: Console, ours: float, plain: float, difference: float, allowed: float
) -> None:
    console.print(
        f"held-out loss {ours:.6f}, of plain float32 jnp on one device {plain:.6f}: "
        f"{difference:.2%} apart (allowed {allowed:.0%})",
        highlight=False,
        soft_wrap=True,
    )


def largest_difference(ours: Iterable[float], plain: Iterable[float]) -> tuple[float, int]:
    """The largest relative difference of two loss curves, and where along them it is."""
    a, b = np.asarray(list(ours)), np.asarray(list(plain))
    difference = np.abs(a - b) / np.abs(b)
    # A loss that is not finite on one side only would otherwise compare as nothing.
    difference = np.where(np.isfinite(difference), difference, np.inf)
    at = int(np.argmax(difference))
    return float(difference[at]), at


def picture(path: Path, ours: list[float], plain: list[float] | None) -> None:
    """loss.png: the sharded curve and, where it was computed, the plain one over it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(ours) + 1), ours, label="shardops, sharded", linewidth=3, alpha=0.5)
    if plain:
        first = len(ours) - len(plain) + 1
        axes.plot(range(first, len(ours) + 1), plain, "k--", label="jnp, one device", linewidth=1)
    axes.set(xlabel="step", ylabel="training loss, nats a character")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
