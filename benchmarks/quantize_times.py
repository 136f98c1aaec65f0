"""Times the quantising kernels, alone and in the norms, launched without XLA.

    python benchmarks/quantize_times.py [--cols 1024,4096] [--only quantize|norm] [--mib 128]
        [--dtype bfloat16] [--min-blocks 2,3,4] [--sweep] [--match TEXT] [--pack DIR]
        [--json FILE]

Of each case the median of a few series of launches, by events. fraction = (bytes that must move: x
in once, a residual in and h out, the 8-bit data and their scales out) / time / copy bandwidth of
this run. --min-blocks: of the kernels of tiles, in the place of the plan's. --pack: without a GPU,
compiles what a run needs into a pack; name that in SHARDOPS_KERNEL_PACK.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compiling import compile_all
from norm_runs import launched
from quantize_shapes import shapes, words_of
from raw_launch import Call, Device
from shardops.kernels import compile, packing
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import (
    QuantizedNorm,
    QuantizedPlan,
    quantized_forward_plan,
)
from shardops.kernels.quantize_plan import (
    QuantizeProblem,
    Scales,
    arranged,
    joined,
    magnitudes_plan,
    quantize_plan,
    tiling,
)
from shardops.kernels.target import Target, current_target, target_for

COLS = (1024, 2048, 4096, 8192, 16384)
LAYOUTS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
RECIPES: tuple[tuple[str, Scales], ...] = (
    ("delayed", "tensor"),
    ("current", "tensor"),
    ("block", "row128"),
    ("square", "square"),
    ("mxfp8", "row32"),
)
SERIES, REPEATS = 7, 12


@dataclass(frozen=True)
class Case:
    """What is timed: launches in order, and arrays and scalars of each."""

    name: str
    launches: tuple[Launch, ...]
    arrays: tuple[tuple[str, ...], ...]
    scalars: tuple[tuple[np.generic, ...], ...]
    sizes: dict[str, int]  # bytes of the arrays
    moved: int


def quantize_cases(rows: int, cols: int, x: str, target: Target) -> Iterator[Case]:
    for recipe, scales in RECIPES:
        for layout, ways in LAYOUTS.items():
            again = recipe == "current"
            problem = arranged(
                QuantizeProblem(1, 1, rows, cols, x, "float8_e4m3fn", scales, *ways,
                                amax=recipe == "delayed", again=again),
                target,
            )  # fmt: skip
            written, sizes = _written(problem, rows, cols)
            sizes |= {"x": rows * cols * jnp.dtype(x).itemsize}
            given = ("scale_inv",) if scales == "tensor" else ()
            launches, arrays = (quantize_plan(problem, target),), (("x", *given, *written),)
            scalars: tuple[tuple[np.generic, ...], ...] = ((problem.shape(tiling(problem)),),)
            moved = sizes["x"] * (1 + again) + sum(sizes[name] for name in written)
            if again:
                search, parts = magnitudes_plan(1, rows * cols, x, target)
                launches, arrays = (search, *launches), (("x", "amax"), *arrays)
                scalars = ((np.int64(rows * cols), np.int32(parts)), *scalars)
            sizes |= {"scale_inv": 4, "amax": 8}
            yield Case(f"quantize {recipe} {layout}", launches, arrays, scalars, sizes, moved)


def norm_cases(rows: int, cols: int, x: str, target: Target, sweep: bool = False) -> Iterator[Case]:
    calls = [("rms", False), ("layer", False), ("rms", True)]
    for (kind, add), (recipe, scales) in ((c, r) for c in calls for r in RECIPES):
        for layout, ways in LAYOUTS.items():
            if recipe == "current":
                continue  # it is a norm and then a quantisation
            written = QuantizeProblem(1, 1, rows, cols, x, "float8_e4m3fn", scales, *ways,
                                      amax=scales == "tensor")  # fmt: skip
            beta = x if kind == "layer" else None
            norm = NormProblem(rows, cols, kind, x, x, beta, add)
            problem = QuantizedNorm(norm, written)
            for shape in shapes(problem, target) if sweep else (None,):
                plan = quantized_forward_plan(problem, target, shape)
                if plan is not None:
                    name = f"{kind}{' add' * add} {recipe} {layout}"
                    yield norm_case(f"{name} {words_of(shape)}", problem, plan, target)


def norm_case(name: str, problem: QuantizedNorm, plan: QuantizedPlan, target: Target) -> Case:
    norm, written = problem.norm, problem.written
    assert written is not None
    rows = norm.rows
    names, sizes = _written(written, rows, norm.cols)
    size = rows * norm.cols * jnp.dtype(norm.x).itemsize
    sizes |= {"x": size, "add": size, "h": size, "gamma": size // rows, "scale_inv": 4}
    sizes |= {"beta": size // rows, "mean": 4 * rows, "rstd": 4 * rows, "amax": 4}
    moved = size * (1 + 2 * norm.add) + sum(sizes[name] for name in names)
    vectors = ("gamma", *("beta",) * (norm.beta is not None))
    residual, given = ("add",) * norm.add, ("scale_inv",) * (written.scales == "tensor")
    h, statistics = ("h",) * norm.add, (*("mean",) * (norm.kind == "layer"), "rstd")
    of_rows = (np.int64(rows), np.int64(rows), np.float32(1e-6))
    of_tiles = of_rows
    if plan.tile is not None:
        of_tiles = (joined(written, target).shape(plan.tile), np.float32(1e-6))
    if plan.statistics is None:
        arrays = (("x", *vectors, *residual, *given, *names, *h, *statistics),)
        return Case(name.strip(), (plan.main,), arrays, (of_tiles,), sizes, moved)
    first = ("x", *residual, *h, *statistics)
    second = ("h" if norm.add else "x", *vectors, *given, *statistics, *names)
    launches = (plan.statistics, plan.main)
    return Case(name.strip(), launches, (first, second), (of_rows, of_tiles), sizes, moved)


def _written(problem: QuantizeProblem, rows: int, cols: int) -> tuple[list[str], dict[str, int]]:
    """Names of the results of quantisation, in order, and their bytes."""
    blocks = -(-rows * cols // problem.block)
    blocks = blocks // 128 if problem.scales == "square" else blocks
    scales = {"tensor": 0, "row32": 1}.get(problem.scales, 4) * blocks
    names: list[str] = []
    for prefix in ("",) * problem.as_rows + ("turned ",) * problem.as_columns:
        names += [f"{prefix}data"] + [f"{prefix}scales"] * (scales > 0)
    sizes = {name: scales if name.endswith("scales") else rows * cols for name in names}
    return names + ["amax"] * problem.amax, sizes | {"amax": 4}


def with_min_blocks(case: Case, blocks: int) -> Case:
    """The case with another register bound for its kernel of tiles."""
    launches = list(case.launches)
    kernel = launches[-1].kernel
    constants = tuple((n, blocks if n == "MIN_BLOCKS" else v) for n, v in kernel.constants)
    launches[-1] = replace(launches[-1], kernel=replace(kernel, constants=constants))
    return replace(case, name=f"{case.name}, {blocks} blocks", launches=tuple(launches))


def variants(case: Case, min_blocks: Sequence[int]) -> list[Case]:
    if case.launches[-1].kernel.name != "quantize_tiles" or not min_blocks:
        return [case]
    return [with_min_blocks(case, blocks) for blocks in min_blocks]


def calls_of(device: Device, case: Case, x: str, codes: dict[Kernel, bytes]) -> list[Call]:
    """The launches, in order, on arrays of their own."""
    names = {name for arrays in case.arrays for name in arrays}
    held: dict[str, jax.Array] = {}
    for seed, name in enumerate(sorted(names)):
        size = case.sizes[name]
        if name in ("x", "add", "gamma", "beta"):
            dtype = jnp.dtype(x)
            held[name] = jax.random.normal(jax.random.key(seed), size // dtype.itemsize, dtype)
        else:
            fill = 0.01 if name == "scale_inv" else 0.0
            held[name] = jnp.full(-(-size // 4), fill, jnp.float32)
    jax.block_until_ready(held)
    return [
        Call(device, launch, codes[launch.kernel], [held[name] for name in arrays], list(scalars))
        for launch, arrays, scalars in zip(case.launches, case.arrays, case.scalars, strict=True)
    ]


def microseconds(device: Device, case: Case, x: str, codes: dict[Kernel, bytes]) -> float:
    run = launched(calls_of(device, case, x, codes))
    return statistics.median(device.microseconds(run, REPEATS) for _ in range(SERIES))


def copy_bandwidth(device: Device, size: int) -> float:
    """Bytes read and written a second, by a copy of the driver's."""
    from ctypes import c_uint64

    arrays = [jnp.ones(size // 4, jnp.float32) for _ in range(2)]
    to, source = (
        c_uint64(array.unsafe_buffer_pointer()) for array in jax.block_until_ready(arrays)
    )

    def run() -> None:
        device.call("cuMemcpyDtoDAsync_v2", to, source, size, device.stream)

    return 2 * size / min(device.microseconds(run, 10) for _ in range(SERIES)) * 1e6


def filled(cases: Sequence[Case], directory: pathlib.Path, arch: str) -> None:
    kernels = dict.fromkeys(launch.kernel for case in cases for launch in case.launches)
    for done in packing.build(list(kernels), arch, compile.pack_directory(directory)):
        print(done.about["kernel"], done.about["resources"], flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {"type": lambda text: tuple(map(int, text.split(",")))}
    parser.add_argument("--cols", **numbers, default=COLS)
    parser.add_argument("--only", choices=("quantize", "norm"))
    parser.add_argument("--mib", type=float, default=128, help="size of x")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--min-blocks", **numbers, default=())
    parser.add_argument("--sweep", action="store_true", help="other shapes of the norms' launches")
    parser.add_argument("--match", default="", help="only cases whose names have this")
    parser.add_argument("--pack", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args(arguments)
    on_gpu = jax.devices()[0].platform == "gpu"
    target = current_target() if on_gpu else target_for("sm_90", 132)
    cases: list[tuple[int, Case]] = []
    for cols in options.cols:
        rows = int(options.mib * 2**20) // (cols * jnp.dtype(options.dtype).itemsize)
        norms = partial(norm_cases, sweep=options.sweep)
        for name, make in (("quantize", quantize_cases), ("norm", norms)):
            if options.only in (None, name):
                found = list(make(rows, cols, options.dtype, target))
                found = [c for c in found if options.match in c.name]
                cases += [(cols, v) for c in found for v in variants(c, options.min_blocks)]
    if options.pack:
        filled([case for _, case in cases], options.pack, target.arch)
    if not on_gpu:
        return 0
    launches = (launch for _, case in cases for launch in case.launches)
    codes = compile_all((launch.kernel for launch in launches), target.arch)
    device = Device()
    bandwidth = copy_bandwidth(device, 2**30)
    print(f"{jax.devices()[0].device_kind}: copy {bandwidth / 1e12:.3f} TB/s; {options.dtype}")
    timed = []
    for cols, case in cases:
        time = microseconds(device, case, options.dtype, codes)
        fraction = case.moved / bandwidth * 1e6 / time
        timed.append({"cols": cols, "case": case.name, "us": time, "fraction": fraction})
        print(f"{cols:6} {case.name:28} {time:8.1f} us {fraction:.3f}", flush=True)
    worst = min((entry["fraction"] for entry in timed), default=math.nan)
    print(f"worst fraction {worst:.3f}")
    if options.json:
        options.json.write_text(json.dumps(timed, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
