"""Times what surrounds the kernels: compiling, finding one on disk, launching, a first call.

    python benchmarks/overheads.py [--lengths 1024,4096] [--json FILE]

cold: one kernel through NVRTC, its caches empty, for each that norms and softmax of these lengths
need. disk: the same kernels in another process, which compiles none. first call: of a function
jitted in a process that has not run it (first_call.py), its kernel on disk, or neither
that nor NVRTC loaded. chain: wall time that one more op adds to a chain of small dependent ops in
one jitted function. eager: what the host does for one call of a small product, calls in a row.
Without a GPU: cold and disk, for sm_90, and eager.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

import shardops as so
from shardops.kernels import packing
from shardops.kernels.families import FAMILIES, Request
from shardops.kernels.launch import Kernel
from shardops.kernels.target import Target, current_target, target_for
from tune import LENGTHS

BYTES = 128 << 20  # of x, in bfloat16
CHAINS = (24, 72)  # ops; what is outside the chain cancels in the difference
CHAIN_RUNS = 5
CHAIN_SHAPE = (8, 1024)
SQUARE = (128, 128)  # both operands of a small product
EAGER_RUNS, EAGER_CALLS = 15, 200
PROCESSES = 3  # of which a first call is the median


@dataclass(frozen=True)
class Row:
    """A line of the table: milliseconds, or microseconds where `unit` says so."""

    what: str
    count: int
    median: float
    least: float
    most: float
    unit: str = "ms"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write rows here")
    options = parser.parse_args(arguments)
    rows = measured(options.lengths or LENGTHS)
    facts = print_rows(rows)
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def measured(lengths: Iterable[int]) -> list[Row]:
    """All rows, in the order of the module's docstring."""
    on_gpu = jax.devices()[0].platform == "gpu"
    target = current_target() if on_gpu else target_for("sm_90", 132)
    kernels = kernels_of(lengths, target)
    with tempfile.TemporaryDirectory() as folder:
        rows = of_kernels(kernels, target, folder)
        if on_gpu:
            rows += first_calls(folder)
    return [*rows, *(chains() if on_gpu else ()), *eager_calls()]


def kernels_of(lengths: Iterable[int], target: Target) -> list[Kernel]:
    found: dict[Kernel, None] = {}
    for op in FAMILIES:
        for length in lengths:
            rows = BYTES // (2 * length)
            request = Request(op, length, "bfloat16")
            found |= dict.fromkeys(packing.kernels_of(request, target.arch, rows, target.sm_count))
    return list(found)


def of_kernels(kernels: Sequence[Kernel], target: Target, folder: str) -> list[Row]:
    asked = [[kernel.file, kernel.name, kernel.constants] for kernel in kernels]
    facts = json.dumps({"arch": target.arch, "kernels": asked})
    found = {}
    for way, origin in (("cold", "compiled"), ("disk", "disk")):
        found[way] = in_fresh_process(way, folder, facts)
        counts = {name: count for name, count in found[way]["counts"].items() if count}
        if counts != {origin: len(kernels)}:
            raise RuntimeError(f"overheads: kernels came from {counts}; expected all {origin}")
    of_name: dict[str, list[float]] = {}
    for kernel, seconds in zip(kernels, found["cold"]["seconds"], strict=True):
        of_name.setdefault(kernel.name, []).append(seconds)
    return [
        *(row(f"cold compile, {name}", of_name[name]) for name in sorted(of_name)),
        row("cold compile, all of these", found["cold"]["seconds"]),
        row("before the first: loading NVRTC", [found["cold"]["loading"]]),
        row("warm from disk", found["disk"]["seconds"]),
        row("warm from disk, the first", found["disk"]["seconds"][:1]),
    ]


def first_calls(folder: str) -> list[Row]:
    found = []
    in_fresh_process("rms_norm", folder)  # fills the cache of kernels
    for op in ("rms_norm", "jnp"):
        runs = [in_fresh_process(op, folder) for _ in range(PROCESSES)]
        if any(run["counts"]["compiled"] for run in runs):
            raise RuntimeError(f"overheads: {runs[0]['counts']}; expected no compiled kernel")
        for part in ("first call", "lower", "XLA", "run"):
            found.append(row(f"{op}: {part}", [run[part] for run in runs]))
    for op in ("rms_norm", "gradient"):
        took = []
        for turn in range(PROCESSES):
            cache = os.path.join(folder, f"{op} {turn}")
            took.append(in_fresh_process(op, folder, cache=cache)["first call"])
        found.append(row(f"{op}: first call, no kernel on disk", took))
    return found


def in_fresh_process(
    what: str, folder: str, text: str = "", cache: str | None = None
) -> dict[str, Any]:
    """What first_call.py says; its kernels are in `cache`, or in `folder`, as its bytecode is."""
    script = pathlib.Path(__file__).with_name("first_call.py")
    environment = os.environ | {
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode
        "PYTHONPYCACHEPREFIX": folder,
        "SHARDOPS_CACHE_DIR": cache or folder,
        "CUDA_CACHE_DISABLE": "1",  # NVRTC's own
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has the memory
    }
    command = [sys.executable, str(script), what]
    done = subprocess.run(
        command, env=environment, input=text, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def chains() -> list[Row]:
    x = jax.random.normal(jax.random.key(0), CHAIN_SHAPE, jnp.bfloat16)
    gamma = jnp.ones(CHAIN_SHAPE[-1], jnp.bfloat16)
    square = jax.random.normal(jax.random.key(1), SQUARE, jnp.bfloat16) / SQUARE[0] ** 0.5
    norms = {"shardops": so.rms_norm, "jnp": jnp_rms_norm}
    products = {"shardops": so.gemm, "jnp": jnp.dot}
    return [
        *(_added_by_one(f"chain of rms_norm, an op: {n}", op, x, gamma) for n, op in norms.items()),
        *(
            _added_by_one(f"chain of gemm, an op: {n}", op, square, square)
            for n, op in products.items()
        ),
    ]


def eager_calls() -> list[Row]:
    x = jnp.ones(SQUARE, jnp.bfloat16)
    took: dict[str, list[float]] = {}
    for turn in range(EAGER_RUNS + 1):  # the first compiles
        for name, op in (("so.gemm", so.gemm), ("jnp.dot", jnp.dot)):
            start = time.perf_counter()
            for _ in range(EAGER_CALLS):
                result = op(x, x)
            seconds = (time.perf_counter() - start) / EAGER_CALLS
            result.block_until_ready()
            if turn > 0:
                took.setdefault(name, []).append(seconds * 1e3)
    return [row(f"eager, a call: {name}", times, "µs") for name, times in took.items()]


def jnp_rms_norm(x: jax.Array, gamma: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * rstd * gamma).astype(x.dtype)


def _added_by_one(what: str, op: Callable[..., jax.Array], x: jax.Array, gamma: jax.Array) -> Row:
    def chain(length: int) -> Callable[..., jax.Array]:
        def run(x: jax.Array, gamma: jax.Array) -> jax.Array:
            for _ in range(length):
                x = op(x, gamma)
            return x

        return jax.jit(run)

    short, long = (chain(length) for length in CHAINS)
    added = []
    for turn in range(CHAIN_RUNS + 1):  # the first compiles
        walls = [_median_wall(run, x, gamma) for run in (short, long)]
        if turn > 0:
            added.append((walls[1] - walls[0]) / (CHAINS[1] - CHAINS[0]) * 1e3)
    return row(what, added, "µs")


def _median_wall(run: Callable[..., jax.Array], x: jax.Array, gamma: jax.Array) -> float:
    times = []
    for _ in range(50):
        start = time.perf_counter()
        run(x, gamma).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def row(what: str, seconds: Sequence[float], unit: str = "ms") -> Row:
    times = [second * 1e3 for second in seconds]
    return Row(what, len(times), statistics.median(times), min(times), max(times), unit)


def print_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows as data too."""
    print("| host side | count | median | least | most |")
    print("|---|---|---|---|---|")
    for r in rows:
        times = " | ".join(f"{t:.1f} {r.unit}" for t in (r.median, r.least, r.most))
        print(f"| {r.what} | {r.count} | {times} |")
    print()
    return [asdict(r) for r in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
