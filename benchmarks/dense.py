"""Times dense layers, forward and backward, under each recipe beside bfloat16.

    python benchmarks/dense.py [--size 8192] [--rounds 3] [--kernels] [--json FILE]

The three products of y = x · kernel and its gradients, of matrices of size x size in bfloat16, by
the time of all their kernels: quantisation included. All take turns, and the median of the rounds
counts. TFLOP/s are effective: 6 size^3 by that time. Two ceilings of the same run come first: bare
products of 8-bit operands that lie as the tensor cores want them, and a copy. Needs a GPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardops as so
from kernel_time import kernel_durations

RECIPES: dict[str, Any] = {
    "bfloat16": None,
    "delayed": so.recipes.DelayedScaling(amax_history_len=16),
    "current": so.recipes.CurrentScaling(),
    "block_128": so.recipes.Block128Scaling(),
}
SETS = 2
SECONDS = 0.05  # of calls in one measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    n = options.size
    subjects = {f"product {name}": Subject(*bare(n, *kinds)) for name, kinds in BARE.items()}
    subjects["copy"] = Subject(jax.jit(lambda sets: [x + 1 for x, *_ in sets]), operands(n))
    subjects["XLA bfloat16"] = Subject(*layer(n, None, xla=True))
    subjects |= {name: Subject(*layer(n, recipe)) for name, recipe in RECIPES.items()}
    flops = dict.fromkeys(subjects, 6 * n**3) | {f"product {name}": 2 * n**3 for name in BARE}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    for _ in range(options.rounds):
        for name, subject in subjects.items():
            measured[name].append(subject.measure())
    print(f"{f'{n}^3':22} {'us':>8} {'spread':>7} {'TFLOP/s':>8}")
    for name, rounds in measured.items():
        totals = [sum(kernels.values()) for kernels in rounds]
        time_of = statistics.median(totals)
        spread = (max(totals) - min(totals)) / time_of
        rate = f"{flops[name] / time_of / 1e6:8.0f}"
        if name == "copy":
            rate = f"{4 * n * n / time_of / 1e6:5.2f} TB/s"
        print(f"{name:22} {time_of:8.0f} {spread:7.1%} {rate}")
        if options.kernels:
            for kernel, of_kernel in sorted(rounds[-1].items(), key=lambda item: -item[1])[:12]:
                print(f"    {of_kernel:8.1f}  {kernel[:90]}")
    if options.json:
        options.json.write_text(json.dumps(measured))


def operands(n: int) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Of each set x, kernel and the cotangent of y."""
    make = jax.jit(
        lambda key: tuple(
            jax.random.normal(k, (n, n), jnp.bfloat16) * s
            for k, s in zip(jax.random.split(key, 3), (1, n**-0.5, 1), strict=True)
        )
    )
    return [make(jax.random.key(i)) for i in range(SETS)]


def layer(n: int, recipe: Any, *, xla: bool = False) -> tuple[Callable[..., Any], Any]:
    """A step over all sets: value, gradients and what is seen."""
    qs = None if recipe is None else recipe.dense_quantizers()

    def one(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> Any:
        def f(x: jax.Array, kernel: jax.Array, qs: Any) -> jax.Array:
            if xla:
                return jnp.dot(x, kernel)
            return so.dense(x, kernel, quantizers=None if qs is None else so.recipes.watch(qs))

        y, pull = jax.vjp(f, x, kernel, qs)
        return y, pull(dy)

    return jax.jit(lambda sets: [one(*arrays) for arrays in sets]), operands(n)


BARE = {"e4m3 e4m3": ("input", "kernel"), "e5m2 e4m3": ("gradient", "kernel")}


def bare(n: int, *roles: Any) -> tuple[Callable[..., Any], Any]:
    """Products of operands that are quantised already, both along the contracted dim."""
    recipe = so.recipes.CurrentScaling()
    quantizers = [recipe.quantizer(role) for role in roles]
    make = jax.jit(lambda x, w: tuple(map(so.quantize, (x, w), quantizers)))
    sets = [tuple(s.detach() for s in make(x, w)) for x, w, _ in operands(n)]
    step = jax.jit(lambda sets: [so.gemm(x, w, contracting_dims=((1,), (1,))) for x, w in sets])
    return step, sets


class Subject:
    """A step over sets of arrays, warmed up."""

    def __init__(self, step: Callable[..., Any], sets: Any):
        self.step, self.sets = step, sets
        for _ in range(3):
            jax.block_until_ready(step(sets))
        start = time.perf_counter()
        jax.block_until_ready(step(sets))
        self.calls = max(3, min(60, int(SECONDS / (time.perf_counter() - start))))

    def measure(self) -> dict[str, float]:
        """Microseconds of each kernel in one set's work."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(self.calls):
                    results = self.step(self.sets)
                jax.block_until_ready(results)
            kernels = kernel_durations(Path(folder))
        sets = self.calls * SETS
        return {
            name: statistics.median(times) * round(len(times) / sets, 2)
            for name, times in kernels.items()
        }


if __name__ == "__main__":
    main()
