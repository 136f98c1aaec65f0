"""Trains a language model under each recipe, and of Flax's own layers, on this GPU.

    python benchmarks/train.py [--steps 300] [--json FILE.json] [--out FILE.png]
    python benchmarks/train.py --draw FILE.json

The model, the text and Adam are the demo's (examples/lm), in bfloat16. Every run starts from the
same parameters and sees the same batches. Each is a process of its own, so that its memory is its
own. They compile at once (Flax's last and alone: XLA chooses its kernels by their times), then
train one after the other, on an otherwise idle GPU. Prints and saves loss curves, the loss on
held-out text, times of a step, and memory; with `--kernels N` also the N kernels that a step spends
the most time in, from a profile of a few steps more.
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
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

RUNS = ("none", "delayed", "current", "block128", "flax")
LABELS = {"none": "bfloat16", "flax": "bfloat16, Flax's layers and XLA"}
ALLOWED_HELD_OUT = 0.02  # above bfloat16
BLOCK = 25  # steps between two waits for the device
EVALUATION_BATCHES = 16
PROFILED = 4  # steps


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.run:
        return train(options)
    if options.draw:
        facts = json.loads(options.draw.read_text())
    else:
        facts = drive(options, arguments)
    if not facts["runs"]:
        return 1
    if options.kernels:
        list_kernels(facts, options.kernels)
    draw(facts, options.out)
    return 0 if table(facts) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    for name, default in (("dim", 1024), ("layers", 10), ("heads", 16), ("seq", 1024)):
        add(f"--{name}", type=int, default=default)
    add("--batch", type=int, default=16)
    add("--steps", type=int, default=300)
    add("--learning-rate", type=float, default=5e-4)
    add("--warmup", type=int, default=100, help="steps up to it; then it falls as 1/sqrt(step)")
    add("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    add("--json", type=pathlib.Path, default=pathlib.Path("out/train.json"), metavar="FILE")
    add("--out", type=pathlib.Path, default=pathlib.Path("docs/_static/recipes.png"))
    add("--draw", type=pathlib.Path, metavar="FILE.json", help="draw what an earlier run saved")
    add("--kernels", type=int, default=0, metavar="N", help="list the N longest of a step")
    add("--run", help=argparse.SUPPRESS)  # one of the processes
    return parser.parse_args(arguments)


# ---- one process, one run ------------------------------------------------------------------------


def train(options: argparse.Namespace) -> int:
    import jax

    from lm import text as corpus
    from lm import training

    began = time.perf_counter()
    text = corpus.read(None, options.seq)
    model = made(options, corpus.VOCABULARY)
    state = training.initial_state(model, options.layers, seed=0)
    parameters = sum(array.size for array in jax.tree.leaves(state["params"]))

    def batch(step: int) -> Any:
        return jax.device_put(text.batch(0, step, options.batch, options.seq))

    start = time.perf_counter()
    step = jax.jit(
        training.step_of(model.loss, options.learning_rate, options.warmup), donate_argnums=0
    )
    lowered = step.lower(state, *batch(0))
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    evaluate = jax.jit(model.loss).lower(state["params"], state["quantizers"], *batch(0)).compile()
    say({"ready": time.perf_counter() - began})
    sys.stdin.readline()

    state = jax.block_until_ready(jax.device_put(state))
    losses, blocks = [], []
    while len(losses) < options.steps:
        first = len(losses)
        count = min(BLOCK, options.steps - first)
        batches = [batch(first + n) for n in range(count)]
        block_start = time.perf_counter()
        for each in batches:
            state, loss = program(state, *each)
            losses.append(loss)
        jax.block_until_ready(losses[-1])
        blocks.append((time.perf_counter() - block_start) / count)
    # Put on the device beforehand: what Python does for a batch is no part of a step.
    held_out = [
        jax.device_put(pair)
        for pair in text.evaluation(text.held_out, options.batch, options.seq, EVALUATION_BATCHES)
    ]
    value = sum(float(evaluate(state["params"], state["quantizers"], *pair)) for pair in held_out)
    kernels = profiled(program, state, batch(0)) if options.kernels else {}
    memory: Any = program.memory_analysis()
    stats = jax.local_devices()[0].memory_stats() or {}
    say(
        {
            "device": jax.local_devices()[0].device_kind,
            "parameters": parameters,
            "losses": [float(loss) for loss in losses],
            "held_out": value / EVALUATION_BATCHES,
            "block_seconds": blocks,
            "trace_seconds": traced - start,
            "compile_seconds": compiled - traced,
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "kernels": kernels,
        }
    )
    return 0


def profiled(program: Any, state: Any, batch: Any) -> dict[str, tuple[float, float]]:
    """Of each kernel how often it runs in a step, and its microseconds there."""
    import jax

    from kernel_time import kernel_durations

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                state, _ = program(state, *batch)
            jax.block_until_ready(state)
        found = kernel_durations(pathlib.Path(folder))
    return {name: (len(each) / PROFILED, sum(each) / PROFILED) for name, each in found.items()}


def made(options: argparse.Namespace, vocabulary: int) -> Any:
    """The model of a run, as functions of its parameters."""
    from flax import nnx
    from jax import numpy as jnp

    from flax_model import FlaxModel
    from lm.model import Functional, Sizes, functional

    sizes = Sizes(options.dim, options.layers, options.heads, options.seq, vocabulary)
    if options.run == "flax":
        return Functional(lambda: FlaxModel(sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    return functional(sizes, recipe=options.run, dtype="bfloat16")


def say(fact: Any) -> None:
    print(json.dumps(fact), flush=True)


# ---- all of them ---------------------------------------------------------------------------------


def drive(options: argparse.Namespace, arguments: Sequence[str]) -> Any:
    """Start the processes, let each train in its turn, and save after each."""
    names = options.runs.split(",")
    if unknown := {*names} - {*RUNS}:
        raise SystemExit(f"--runs: {', '.join(sorted(unknown))}: expected {', '.join(RUNS)}")
    # They share the GPU's memory: none may take most of it when it starts.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def started(name: str) -> Any:
        return subprocess.Popen(
            [sys.executable, __file__, *arguments, "--run", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    processes: dict[str, Any] = {}
    ready: dict[str, Any] = {}
    for together in ([n for n in names if n != "flax"], [n for n in names if n == "flax"]):
        processes |= {name: started(name) for name in together}
        for name in together:
            fact = ready[name] = heard(processes[name])
            print(f"{name}: ready after {fact['ready']:.1f} s" if fact else f"{name}: failed")
    sizes = ("dim", "layers", "heads", "seq", "batch", "steps", "learning_rate", "warmup")
    facts: Any = {name: getattr(options, name) for name in sizes} | {"asked": names, "runs": {}}
    for name in names:
        if not ready[name]:
            continue
        process = processes[name]
        process.stdin.write("train\n")
        process.stdin.flush()
        if fact := heard(process):
            facts["runs"][name] = fact
            print(f"{name}: held-out loss {fact['held_out']:.4f}", flush=True)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(facts))
        process.communicate()
    return facts


def heard(process: Any) -> Any:
    """The next line of facts, or nothing where the process ended without."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    return None


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
        kernels = sorted(run["kernels"].items(), key=lambda item: -item[1][1])
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
            smooth = np.convolve(losses / wide[: len(losses)] - 1, np.ones(20) / 20, "valid")
            apart.plot(steps[19:], 100 * smooth, linewidth=1, **style)
    curves.set(ylabel="training loss, nats a character")
    curves.legend(title="held-out loss", fontsize=8, frameon=False)
    apart.axhline(0, color="black", linewidth=0.8)
    apart.set(xlabel="step", ylabel="to bfloat16, %, mean of 20 steps")
    for axes in (curves, apart):
        axes.grid(color="0.9")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
