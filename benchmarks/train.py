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
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from train_report import RUNS, draw, list_kernels, table

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

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
    good = table(facts)
    draw(facts, options.out)
    return 0 if good else 1


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
