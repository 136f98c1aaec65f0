"""Times sharded products and layers over the GPUs of this host, beside XLA's partitioning of jnp.

    python benchmarks/multi.py [--devices 1,2,4,8] [--size 8192] [--within 150]
                               [--json FILE] [--picture FILE]

A time is the wall time of a step in a chain of steps back to back. Beside it: its kernels alone on
one device, its collectives alone, what `so.explain` predicts, and how much of the collectives' time
had a kernel beside it, by a profile. "overlapping" is XLA with its options for that
(`OVERLAPPING` of multi_timing.py). Strong scaling keeps the size, weak scaling has it grow with the
devices. First comes each kind of collective by size. What does not fit --within is left out, and
said. On a CPU it runs tiny shapes on virtual devices: a smoke test, not a measurement.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

import jax

from multi_layer import Sizes, layers_of
from multi_picture import draw
from multi_products import products
from multi_timing import beside, chained, last_to_come, mesh_of, one_collective
from shardops import hlo
from shardops.explaining import timing
from shardops.rules.hardware import DEFAULT
from shardops.rules.step import Step

KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-reduce": "psum",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
TIMED = ("shardops", "XLA", "XLA, overlapping", "kernels alone", "collectives alone")
WORKERS = 8  # programs that are compiled at once


@dataclass(frozen=True)
class Row:
    """One subject on some devices; times in microseconds of a step."""

    name: str
    operands: str
    direction: str
    scaling: str
    devices: int
    shape: tuple[int, int, int]
    flops: float  # of all devices
    times: dict[str, float]  # of TIMED, those that there are
    predicted: float  # of the collectives, by explain
    received: float  # bytes a device, in the compiled program
    profile: tuple[float, float, float] | None  # kernels, collectives, both

    @property
    def rate(self) -> float:
        """TFLOP/s of all devices."""
        return self.flops / self.times["shardops"] / 1e6


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="numbers of devices; default: 1, 2, 4, ... up to all")
    parser.add_argument("--size", type=int, default=8192, help="tokens, k and n of the products")
    parser.add_argument("--within", type=float, default=150, metavar="SECONDS")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--picture", type=pathlib.Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.within
    found = jax.devices()
    on_gpu = found[0].platform == "gpu"
    if len(found) < 2:
        print("bench-multi: one device; expected at least 2. On a CPU set "
              "XLA_FLAGS=--xla_force_host_platform_device_count=8.", file=sys.stderr)  # fmt: skip
        return 2
    size = options.size if on_gpu else 256
    sizes = Sizes() if on_gpu else Sizes(2, 256, 256, 4, 2, 512)
    counts = [n for n in (1, 2, 4, 8, 16) if n <= len(found)]
    if options.devices:
        counts = [int(n) for n in options.devices.split(",")]
    date = time.strftime("%Y-%m-%d")
    print(f"{len(found)} x {found[0].device_kind}, jax {jax.__version__}, {date}")
    if not on_gpu:
        print("A CPU run: tiny shapes, virtual devices. These times say nothing about GPUs.")
    collectives = [one for n in counts if n > 1 for one in links(n, on_gpu)]
    subjects = [
        one
        for n in sorted(counts, reverse=True)
        for one in (*layers_of(n, sizes), *products(n, size))
    ]
    # bfloat16 and gradients first, which the pictures need: there may be no time for all.
    subjects.sort(key=lambda one: (one.operands != "bfloat16", not one.backward))
    rows = measured(subjects, until)
    saved = {"collectives": collectives, "rows": [asdict(row) for row in rows]}
    if options.json:
        options.json.write_text(json.dumps(saved, indent=1))
    if options.picture:
        draw(saved["rows"], options.picture)
    return int(len(rows) < len(subjects))


def links(n: int, on_gpu: bool) -> list[dict[str, Any]]:
    """Each kind of collective by the bytes that a device receives, beside explain's prediction."""
    mesh, out = mesh_of(n), []
    print(f"\n| collective, {n} devices | bytes received | µs | GB/s | explain µs |")
    print("|---|---|---|---|---|")
    for kind, named in KINDS.items():
        for received in (2**16, 2**20, 2**24, 2**28) if on_gpu else (2**16,):
            took = last_to_come(one_collective(kind, received, mesh))
            step = Step(named, ("tp",), (), (), bytes=received)
            predicted = timing.microseconds(step, {"tp": n}, DEFAULT)
            rate = received / took / 1e3
            out.append({"kind": kind, "devices": n, "bytes": received, "microseconds": took,
                        "predicted": predicted})  # fmt: skip
            print(
                f"| {kind} | {received} | {took:.1f} | {rate:.0f} | {predicted:.1f} |", flush=True
            )
    return out


def measured(subjects: Sequence[Any], until: float) -> list[Row]:
    """Compiles some at once, then times these one after another; prints the table line by line."""
    print("\n| what | operands | pass | scaling | GPUs | shape | shardops µs | TFLOP/s | XLA | "
          "XLA, overlapping | kernels alone | collectives alone (GB/s) | explain, collectives | "
          "hidden | collectives beside a kernel |\n|" + "---|" * 15)  # fmt: skip
    rows = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for at in range(0, len(subjects), WORKERS):
            group = subjects[at : at + WORKERS]
            if time.monotonic() > until:
                print(f"left out, as {len(subjects) - at} more do not fit --within")
                break
            compiled = [pool.submit(subject.programs) for subject in group]
            wait(compiled)
            for subject, made in zip(group, compiled, strict=True):
                try:
                    rows.append(row(subject, *made.result()))
                except Exception as error:  # the others' times are worth having all the same
                    print(f"failed: {subject}: {error}", file=sys.stderr)
                    continue
                print(_line(rows[-1]), flush=True)
    return rows


def row(subject: Any, programs: dict[str, Any], report: Any) -> Row:
    seen = beside(programs["shardops"])
    return Row(
        subject.name,
        subject.operands,
        "forward, backward" if subject.backward else "forward",
        subject.scaling,
        subject.devices,
        subject.shape,
        subject.flops,
        {name: chained(programs[name]) for name in TIMED if name in programs},
        report.microseconds,
        sum(hlo.received_bytes(c) for c in report.collectives or ()),
        None if seen is None else (seen.kernels, seen.collectives, seen.both),
    )


def _line(row: Row) -> str:
    times = row.times
    kernels, alone = times.get("kernels alone"), times.get("collectives alone")
    cells = [row.name, row.operands, row.direction, row.scaling, str(row.devices)]
    cells += ["×".join(map(str, row.shape)), f"{times['shardops']:.0f}", f"{row.rate:.0f}"]
    cells += [f"{times[n]:.0f}" if n in times else "" for n in ("XLA", "XLA, overlapping")]
    if row.profile and kernels is None:
        kernels = row.profile[0]  # of a layer: by the profile of the step itself
    cells.append("" if kernels is None else f"{kernels:.0f}")
    if alone is None:
        cells += [""] * 4
    else:
        cells.append(f"{alone:.0f} ({row.received / alone / 1e3:.0f})")
        cells.append(f"{row.predicted:.0f}")
        cells.append(
            "" if kernels is None else f"{(kernels + alone - times['shardops']) / alone:.0%}"
        )
        cells.append(f"{row.profile[2] / row.profile[1]:.0%}" if row.profile else "")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
