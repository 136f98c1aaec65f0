"""Times the softmax kernels over row lengths, and with --sweep the launch shapes they could have.

    python benchmarks/softmax_times.py [--sweep] [--keys 1024,4096] [--only forward|backward]
        [--dtype bfloat16] [--kind plain|causal|masked] [--mib 128] [--rows N] [--json FILE]

A time is kernel time (kernel_time.py). floor = the bytes that must move (operands as far as they
are seen, once, and the result, once) / the copy bandwidth of this run; fraction = floor / time.
Needs a GPU: without one it lists the launch shapes.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from bench import copy_bandwidth
from kernel_time import microseconds
from shardops.kernels import softmax, softmax_plan
from shardops.kernels.softmax_plan import Geometry, SoftmaxProblem
from shardops.kernels.target import Target, current_target, target_for

KEYS = (16, 24, 33, 64, 127, 128, 256, 512, 768, 1000, 1001, 1024, 1536, 2048, 2880, 3000, 3001)
KEYS += (3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 20480, 32768, 65536, 262144, 1048576)
SETS = 4


def candidates(problem: SoftmaxProblem, target: Target, operands: int) -> Iterator[Geometry]:
    """Launch shapes worth timing: the one that the plan chooses comes first."""
    chosen = (softmax_plan.forward_geometry if operands == 1 else softmax_plan.backward_geometry)(
        problem, target
    )
    yield chosen
    seen = {chosen}
    for geometry in (
        *_tiles(problem, operands),
        *_in_registers(problem, target, operands),
        *_long(problem, target),
    ):
        if geometry not in seen:
            seen.add(geometry)
            yield geometry


def _tiles(problem: SoftmaxProblem, operands: int) -> Iterator[Geometry]:
    size = 16 // problem.vector
    if problem.keys > 1024:
        return
    for group in (1, 2, 4, 8, 16, 32):
        each = -(-problem.keys // group)
        if each > 32 or (each < 4 and group > 1):
            continue
        teams = 256 // group
        for words in (2, 4, 8):
            rows = teams * max(1, 256 * words * problem.vector // (teams * problem.keys * operands))
            if operands * rows * problem.keys * size > 96 * 1024:
                continue
            registers = 28 + each * operands + 16 * problem.causal + 16 * (problem.mask > 0)
            blocks = min(8, 65536 // (256 * registers))
            yield Geometry("tile", 256, rows, min_blocks=max(1, blocks), group=group)


def _in_registers(problem: SoftmaxProblem, target: Target, operands: int) -> Iterator[Geometry]:
    for parts in (1, 2, 4, 8, 16):
        if parts > 1 and problem.words < 1024 * parts // 4:
            continue
        words = -(-problem.words // parts)
        for each in (1, 2, 4, 8, 16):
            if each * operands > 16:
                continue
            if parts == 1 and words <= 32 * each:
                threads = 1 << (-(-words // each) - 1).bit_length()
                if threads * each >= 2 * max(words, 2):
                    continue  # a smaller `each` does as well
                shapes = [(threads, size // threads) for size in (128, 256) if size >= threads]
            else:
                threads = -(-words // (32 * each)) * 32
                shapes = [(threads, max(1, 128 // threads) if parts == 1 else 1)]
            for threads, rows in shapes:
                if threads * rows > 1024 or threads * rows % 32:
                    continue
                registers = 28 + each * (4 if operands == 1 else 8)
                for resident in (512, 1024, 1536, 2048):
                    blocks = resident // (threads * rows)
                    if not 1 <= blocks <= 32 or 65536 // (blocks * threads * rows) < registers:
                        continue
                    found = Geometry("registers", threads, rows, parts, blocks)
                    unpacked = registers + each * problem.vector - 4 * each
                    fits = 65536 // (blocks * threads * rows) >= unpacked
                    if fits or problem.x == "float32" or operands == 2:
                        yield found
                    if problem.x != "float32" and operands == 1 and each >= 4:
                        yield replace(found, hold=False)


def _long(problem: SoftmaxProblem, target: Target) -> Iterator[Geometry]:
    if problem.words < 4096:
        return
    for parts in (1, 4, 8, 16):
        for threads, blocks in ((256, 4), (512, 2), (1024, 1)):
            yield Geometry("long", threads, parts=parts, min_blocks=blocks)
    if problem.rows < 2 * target.sm_count:
        parts = min(64, -(-2 * target.sm_count // problem.rows))
        yield Geometry("long", 512, parts=parts, min_blocks=2, stages=2)


def described(geometry: Geometry) -> str:
    text = f"{geometry.kind} threads {geometry.threads} rows {geometry.rows}"
    text += f" parts {geometry.parts} blocks {geometry.min_blocks}"
    text += f" group {geometry.group}" if geometry.kind == "tile" else ""
    text += " twice" if not geometry.hold else ""
    return text + (" two stages" if geometry.stages == 2 else "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time all launch shapes")
    parser.add_argument("--keys", type=lambda text: tuple(map(int, text.split(","))), default=KEYS)
    parser.add_argument("--only", choices=("forward", "backward"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--kind", choices=("plain", "causal", "masked"), default="plain")
    parser.add_argument("--mib", type=float, default=128, help="size of x")
    parser.add_argument("--rows", type=int, help="rows of x, in the place of --mib")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write rows here")
    options = parser.parse_args(arguments)
    on_gpu = jax.devices()[0].platform == "gpu"
    target = current_target() if on_gpu else target_for("sm_90", 132)
    bandwidth = copy_bandwidth(2**30) if on_gpu else math.nan
    print(f"{jax.devices()[0].device_kind}: copy {bandwidth / 1e12:.2f} TB/s; {options.dtype}")
    found = []
    for keys in options.keys:
        rows = options.rows or max(1, int(options.mib * 2**20) // (keys * _size(options.dtype)))
        queries = min(keys, rows) if options.kind == "causal" else min(1024, rows)
        shape = (max(1, rows // queries), queries, keys)
        for name, operands in (("forward", 1), ("backward", 2)):
            if options.only in (None, name) and (name, options.kind) != ("backward", "masked"):
                found += _timed(name, operands, shape, options, target, bandwidth, on_gpu)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _timed(name, operands, shape, options, target, bandwidth, on_gpu) -> list[dict]:
    batch, queries, keys = shape
    causal, masked = options.kind == "causal", options.kind == "masked"
    problem = SoftmaxProblem(
        batch * queries, keys, options.dtype, int(masked), int(masked and batch > 1), causal
    )
    geometries = list(candidates(problem, target, operands))
    geometries = geometries if options.sweep else geometries[:1]
    statics = {"scale": 0.125, "diagonal": 0 if causal else None}
    sets = [
        [_drawn(shape, options.dtype, 2 * s + i) for i in range(operands)]
        for s in range(SETS if on_gpu else 0)
    ]
    if masked:
        sets = [[*arrays, _hidden((batch, 1, keys))] for arrays in sets]
    seen = sum(min(q + 1, keys) for q in range(queries)) * batch if causal else math.prod(shape)
    moved = (operands * seen + math.prod(shape)) * _size(options.dtype) + masked * batch * keys
    floor = moved / bandwidth * 1e6
    found = []
    for geometry in geometries:
        if operands == 1:
            run = softmax.softmax_forward
            op = partial(_forward, run, masked, statics | {"geometry": geometry})
        else:
            op = partial(_backward, softmax.softmax_backward, statics | {"geometry": geometry})
        try:
            time = microseconds(op, sets) if on_gpu else math.nan
        except Exception as error:  # one launch shape that does not run must not end a sweep
            print(f"{name} {keys}: {described(geometry)}: {str(error).splitlines()[0][:120]}")
            continue
        entry = {"op": name, "kind": options.kind, "shape": shape, "dtype": options.dtype}
        entry |= {"geometry": described(geometry), "us": time, "fraction": floor / time}
        entry["chosen"] = geometry == geometries[0]
        found.append(entry)
    for entry in sorted(found, key=lambda e: -e["fraction"])[: 6 if on_gpu else None]:
        _show(entry)
    if found and on_gpu and found[0] not in sorted(found, key=lambda e: -e["fraction"])[:6]:
        _show(found[0])
    return found


def _show(entry: dict) -> None:
    mark = "*" if entry["chosen"] else " "
    print(
        f"{mark} {entry['op']:8} {entry['kind']:6} {entry['shape'][-1]:8}"
        f" {entry['us']:8.1f} us {entry['fraction']:.3f}  {entry['geometry']}",
        flush=True,
    )


def _forward(run, masked, statics, x, *masks):
    return run(x, masks[0] if masked else None, None, **statics)


def _backward(run, statics, dy, y):
    return run(dy, y, None, **statics)


def _drawn(shape, dtype, seed):
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def _hidden(shape):
    return jax.random.uniform(jax.random.key(99), shape) < 0.3


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
