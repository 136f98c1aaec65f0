"""Times products of 8-bit operands beside torch's, by the time of their kernels.

    python benchmarks/fp8_gemm.py [--rounds 3] [--json FILE]

Result in bfloat16, fast accumulation for one scale a tensor, 1 x 128 by 128 x 128 blocks. Torch
runs in a process of its own; both take turns, on the same sizes, and the median of the rounds
counts. "all" is every kernel that a product runs, what brings scales into cuBLASLt's order
included, "gemm" the longest alone; torch is given its scales prepared, and all its kernels count.
Needs a GPU; without torch its columns stay empty.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHAPES = (  # m, n, k
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 12288, 4096),
    (4096, 4096, 16384),
    (16384, 4096, 4096),
)
MODES = ("tensor", "block_128")
SETS = 3
SECONDS = 0.04  # of calls in one measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        serve_torch()
        return
    problems = [(*shape, mode) for shape in SHAPES for mode in MODES]
    ours = {problem: Ours(*problem) for problem in problems}
    measured: dict[Any, list[Figure]] = defaultdict(list)
    with Torch() as torch:
        print(f"{'TFLOP/s':20} {'mode':10} {'all':>6} {'gemm':>6} {'torch':>6} {'all/torch':>9}")
        for _ in range(options.rounds):
            for problem in problems:
                figure = Figure(*ours[problem].measure(), torch.measure(*problem))
                measured[problem].append(figure)
                print(_line(problem, figure), flush=True)
    if options.rounds > 1:
        print("the median of the rounds, of each column")
        for problem in problems:
            print(_line(problem, _median(measured[problem])))
    if options.json:
        options.json.write_text(json.dumps([[p, *map(asdict, f)] for p, f in measured.items()]))


@dataclass(frozen=True)
class Figure:
    """Microseconds of a product: of all its kernels, of the longest, of torch's."""

    all: float
    gemm: float
    torch: float | None


def _median(figures: list[Figure]) -> Figure:
    theirs = [f.torch for f in figures if f.torch is not None]
    return Figure(
        statistics.median(f.all for f in figures),
        statistics.median(f.gemm for f in figures),
        statistics.median(theirs) if theirs else None,
    )


def _line(problem: tuple[Any, ...], figure: Figure) -> str:
    m, n, k, mode = problem
    times = (figure.all, figure.gemm, figure.torch)
    rates = [2e-6 * m * n * k / t if t else float("nan") for t in times]
    text = " ".join(f"{r:6.0f}" for r in rates)
    return f"{f'{m}x{n}x{k}':20} {mode:10} {text} {rates[0] / rates[2]:9.2f}"


class Ours:
    """`so.gemm` of ScaledArrays with both operands along k."""

    def __init__(self, m: int, n: int, k: int, mode: str):
        import jax
        import jax.numpy as jnp

        import shardops as so

        def scaled(key: Any, rows: int, block: tuple[int, int] | None) -> so.ScaledArray:
            data = jax.random.normal(key, (rows, k)).astype(jnp.float8_e4m3fn)
            shape = () if block is None else (rows // block[0], k // block[1])
            scale = jnp.exp2(jax.random.uniform(key, shape, minval=-1.0))
            kind = so.ScalingMode(mode if block else "tensor_current")
            return so.ScaledArray(data, scale, None, kind, jnp.bfloat16, block)

        blocks = ((1, 128), (128, 128)) if mode == "block_128" else (None, None)
        make = jax.jit(
            lambda key: (
                scaled(key, m, blocks[0]),
                scaled(jax.random.fold_in(key, 1), n, blocks[1]),
            )
        )
        self.sets = [make(jax.random.key(i)) for i in range(SETS)]
        self.step: Callable[..., Any] = jax.jit(
            lambda sets: [so.gemm(x, w, contracting_dims=((1,), (1,))) for x, w in sets]
        )

    def measure(self) -> tuple[float, float]:
        """Microseconds of a product: of all its kernels, and of the longest."""
        import jax

        from kernel_time import kernel_durations

        calls = _calls(lambda: jax.block_until_ready(self.step(self.sets)))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(calls):
                    results = self.step(self.sets)
                jax.block_until_ready(results)
            kernels = kernel_durations(Path(folder))
        return _summed(kernels, calls * SETS), _summed(_largest(kernels), calls * SETS)


class Torch:
    """A process that times torch's products; measures None where there is no torch."""

    def __enter__(self) -> "Torch":
        command = [sys.executable, __file__, "--torch"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()  # closes its input, which ends it

    def measure(self, *problem: Any) -> float | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(problem), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline() or "null")
        except BrokenPipeError:
            return None


def serve_torch() -> None:
    """Answers each line of stdin, [m, n, k, mode], with microseconds."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        print(f"no torch: {error}", file=sys.stderr)
        return
    made: dict[tuple[Any, ...], Any] = {}
    for line in sys.stdin:
        problem = tuple(json.loads(line))
        if problem not in made:
            made[problem] = _torch_operands(torch, *problem)
        sets, fast = made[problem], problem[3] == "tensor"

        def step(sets: Any = sets, fast: bool = fast) -> None:
            for x, w, a, b in sets:
                torch._scaled_mm(x, w, a, b, out_dtype=torch.bfloat16, use_fast_accum=fast)

        def finished(step: Callable[[], None] = step) -> None:
            step()
            torch.cuda.synchronize()

        calls = _calls(finished)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(calls):
                step()
            torch.cuda.synchronize()
        kernels = defaultdict(list)
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.name].append(event.time_range.elapsed_us())
        print(json.dumps(_summed(kernels, calls * SETS)), flush=True)


def _torch_operands(torch: Any, m: int, n: int, k: int, mode: str) -> list[tuple[Any, ...]]:
    sets = []
    for _ in range(SETS):
        x, w = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
        if mode == "tensor":
            a, b = (torch.rand((), device="cuda") + 0.5 for _ in range(2))
        else:
            a = (torch.rand(k // 128, m, device="cuda") + 0.5).t()
            b = (torch.rand(n // 128, k // 128, device="cuda") + 0.5).t()
        sets.append((x, w.t(), a, b))
    return sets


def _calls(finished: Callable[[], None]) -> int:
    """How many calls fill a measurement, after some that warm up."""
    for _ in range(3):
        finished()
    start = time.perf_counter()
    finished()
    return max(3, min(60, int(SECONDS / (time.perf_counter() - start))))


def _summed(kernels: dict[str, list[float]], ops: int) -> float:
    """Of each kernel the median counts, times its runs an op."""
    return sum(statistics.median(t) * round(len(t) / ops, 2) for t in kernels.values())


def _largest(kernels: dict[str, list[float]]) -> dict[str, list[float]]:
    name = max(kernels, key=lambda name: sum(kernels[name]))
    return {name: kernels[name]}


if __name__ == "__main__":
    main()
