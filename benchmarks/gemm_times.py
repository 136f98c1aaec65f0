"""Times products beside XLA's and torch's, by the time of their kernels.

    python benchmarks/gemm_times.py [--only bfloat16,tensor,block_128] [--rounds 5] [--json FILE]

bfloat16: jnp.dot and torch.matmul beside so.gemm. tensor and block_128: 8-bit operands along k, one
scale a tensor and fast accumulation, or 1 x 128 by 128 x 128 blocks, result in bfloat16, beside
torch's _scaled_mm, which is given its scales prepared. "tuned" is so.gemm under SHARDOPS_AUTOTUNE=1
with an empty cache. All take turns on the same sizes: a warm card is a slow one. The table has the
median of the rounds and, behind it, what lies between the least and the most, in percent of it.
Every kernel of a product counts. Needs a GPU; without torch its column stays empty.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHAPES = (  # m, n, k
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 12288, 4096),
    (4096, 4096, 16384),
    (16384, 4096, 4096),
)
MORE_SHAPES = (  # of bfloat16: thin, flat, and of rows that begin anywhere
    (128, 8192, 8192),
    (16, 8192, 8192),
    (8192, 8192, 64),
    (3000, 3000, 3000),
    (4097, 4099, 4101),
)
MODES = ("bfloat16", "tensor", "block_128")
CONTENDERS = ("shardops", "tuned", "XLA", "torch")
SETS = 3
SECONDS = 0.03  # of calls in one measurement

Problem = tuple[int, int, int, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=MODES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        serve_torch()
        return
    problems = [
        (*shape, mode)
        for mode in options.only
        for shape in (*SHAPES, *(MORE_SHAPES if mode == "bfloat16" else ()))
    ]
    print(f"| m×n×k | operands | {' | '.join(CONTENDERS)} | to the best peer | tuned |")
    print("|---|---|" + "---|" * (len(CONTENDERS) + 2))
    found = {}
    with Torch() as torch:
        for problem in problems:
            found[problem] = measure(problem, torch, options.rounds)
            print(_line(problem, found[problem]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([[p, times] for p, times in found.items()]))


def measure(problem: Problem, torch: "Torch", rounds: int) -> dict[str, list[float]]:
    """Microseconds of a product in each round, by contender."""
    sets = operands(*problem)
    steps = dict(_steps(problem[3], sets))
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(microseconds(step, sets))
        theirs = torch.measure(*problem)
        if theirs is not None:
            times["torch"].append(theirs)
    return times


def _line(problem: Problem, times: dict[str, list[float]]) -> str:
    m, n, k, mode = problem
    median = {name: statistics.median(values) for name, values in times.items()}
    cells = ["–"] * len(CONTENDERS)
    for i, name in enumerate(CONTENDERS):
        if name in times:
            spread = (max(times[name]) - min(times[name])) / median[name]
            cells[i] = f"{2e-6 * m * n * k / median[name]:.0f} ({100 * spread:.0f} %)"
    peers = [median[name] for name in ("XLA", "torch") if name in median]
    ratios = [f"{min(peers) / median[name]:.3f}" if peers else "–" for name in CONTENDERS[:2]]
    return f"| {m}×{n}×{k} | {mode} | {' | '.join((*cells, *ratios))} |"


def operands(m: int, n: int, k: int, mode: str) -> list[tuple[Any, Any]]:
    import jax
    import jax.numpy as jnp

    import shardops as so

    def scaled(key: Any, rows: int, block: tuple[int, int] | None) -> so.ScaledArray:
        data = jax.random.normal(key, (rows, k)).astype(jnp.float8_e4m3fn)
        shape = () if block is None else (rows // block[0], k // block[1])
        scale = jnp.exp2(jax.random.uniform(key, shape, minval=-1.0))
        kind = so.ScalingMode(mode if block else "tensor_current")
        return so.ScaledArray(data, scale, None, kind, jnp.bfloat16, block)

    def make(key: Any) -> tuple[Any, Any]:
        keys = jax.random.split(key)
        if mode == "bfloat16":
            x, w = (jax.random.normal(a, s) for a, s in zip(keys, ((m, k), (k, n)), strict=True))
            return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        blocks = ((1, 128), (128, 128)) if mode == "block_128" else (None, None)
        return scaled(keys[0], m, blocks[0]), scaled(keys[1], n, blocks[1])

    return [jax.jit(make)(jax.random.key(i)) for i in range(SETS)]


def _steps(mode: str, sets: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Compiled products of all sets, by contender."""
    import jax
    import jax.numpy as jnp

    import shardops as so

    dims = ((1,), (0,)) if mode == "bfloat16" else ((1,), (1,))

    def compiled(op: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda sets: [op(x, w) for x, w in sets]).lower(sets).compile()

    def product(x: Any, w: Any) -> Any:
        return so.gemm(x, w, contracting_dims=dims)

    yield "shardops", compiled(product)
    with _autotune():
        yield "tuned", compiled(product)
    if mode == "bfloat16":
        yield "XLA", compiled(jnp.dot)


@contextlib.contextmanager
def _autotune() -> Iterator[None]:
    """The environment with SHARDOPS_AUTOTUNE=1, read again."""
    from shardops import config

    with tempfile.TemporaryDirectory() as folder:
        changes = {"SHARDOPS_AUTOTUNE": "1", "SHARDOPS_CACHE_DIR": folder}
        before = {name: os.environ.pop(name, None) for name in changes}
        os.environ.update(changes)
        config.get.cache_clear()
        try:
            yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value
            config.get.cache_clear()


def microseconds(step: Callable[..., Any], sets: Any) -> float:
    import jax

    from kernel_time import kernel_durations

    calls = _calls(lambda: jax.block_until_ready(step(sets)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                results = step(sets)
            jax.block_until_ready(results)
        return _summed(kernel_durations(Path(folder)), calls * SETS)


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
    made: tuple[Any, Any] = (None, None)
    for line in sys.stdin:
        problem = tuple(json.loads(line))
        if problem != made[0]:
            made = problem, _torch_operands(torch, *problem)
        sets, mode = made[1], problem[3]

        def step(sets: Any = sets, mode: str = mode) -> None:
            for x, w, a, b in sets:
                if mode == "bfloat16":
                    torch.matmul(x, w)
                else:
                    fast = mode == "tensor"
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
    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda")

    if mode == "bfloat16":
        return [(draw(m, k).bfloat16(), draw(k, n).bfloat16(), None, None) for _ in range(SETS)]
    sets = []
    for _ in range(SETS):
        x, w = (draw(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
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


if __name__ == "__main__":
    main()
