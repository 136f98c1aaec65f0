"""Times the kernels beside XLA's own code for the same mathematics, in one run on this machine.

    python benchmarks/bench.py [--only norms|gemm] [--json FILE]

A time is the time of the op's kernels in a profile of back-to-back calls (kernel_time.py); the gaps
between kernels and the host's time do not count.

floor = the bytes that must move (inputs once, outputs once) / the copy bandwidth of this run.
XLA = the jnp reference under jit, GEMM: jnp.matmul. Prints tables for docs/measured.md.
Without a GPU it runs tiny shapes on the reference path: a smoke test, not a measurement.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import shardops as so
from kernel_time import microseconds
from shardops.primitives import norm_local

NORM_SHAPES = (
    (16384, 1024), (16384, 2048), (16384, 4096), (8192, 8192),
    (8192, 5120), (8192, 7168), (4096, 12288), (8192, 3000),
)  # fmt: skip
GEMM_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336))
TINY_NORMS, TINY_GEMMS = ((64, 96),), ((64, 96, 32),)
SETS = 4  # copies of the op, each with its own arrays
EPSILON = 1e-6


@dataclass(frozen=True)
class Row:
    """One line of a table: microseconds of one op."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    floor: float
    shardops: float
    xla: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("norms", "gemm"))
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="also write the rows here"
    )
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    print(f"{device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}")
    if not on_gpu:
        print("A CPU run: tiny shapes, reference path. These times say nothing about the kernels.")
    bandwidth = copy_bandwidth(2**30 if on_gpu else 2**20)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n")
    norms, gemms = [], []
    if options.only != "gemm":
        norms = [
            row
            for shape in (NORM_SHAPES if on_gpu else TINY_NORMS)
            for row in norm_rows(*shape, bandwidth)
        ]
        print_norms(norms)
    if options.only != "norms":
        gemms = [
            row for shape in (GEMM_SHAPES if on_gpu else TINY_GEMMS) for row in gemm_rows(*shape)
        ]
        print_gemms(gemms)
    if options.json:
        facts = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "copy_bytes_per_second": bandwidth,
            "norms": [asdict(row) for row in norms],
            "gemm": [asdict(row) for row in gemms],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def copy_bandwidth(size: int) -> float:
    """Bytes read and written a second: the better of a copy and of an elementwise kernel."""
    sets = [(jnp.full(size // 4, 1.5, jnp.float32),) for _ in range(2)]
    time = min(microseconds(jnp.copy, sets), microseconds(jnp.negative, sets))
    return 2 * size / time * 1e6


def norm_rows(rows: int, cols: int, bandwidth: float) -> list[Row]:
    """Forward, backward and backward with a residual's cotangent, of both norms."""
    draw = partial(jax.random.normal, shape=(rows, cols), dtype=jnp.bfloat16)
    sets = [[draw(jax.random.key(3 * s + i)) for i in range(3)] for s in range(SETS)]
    gamma, beta = jnp.ones(cols, jnp.bfloat16), jnp.zeros(cols, jnp.bfloat16)
    found = []
    for kind, name in (("rms", "rms_norm"), ("layer", "layer_norm")):
        statics = {"kind": kind, "beta": kind == "layer", "zero_centered_gamma": False}
        shift = (beta,) if kind == "layer" else ()
        forward = {**statics, "add": False, "epsilon": EPSILON}
        reference = partial(norm_local.forward_reference, **forward)
        kernel = partial(norm_local.local_forward, kernel=True, **forward)
        statistics_of = [jax.jit(reference)(x, gamma, *shift)[1:] for x, _, _ in sets]
        variants = {
            "forward": (reference, kernel, [(x, gamma, *shift) for x, _, _ in sets], 2),
        }
        for residual in (False, True):
            backward = {**statics, "residual": residual}
            variants["backward, add" if residual else "backward"] = (
                partial(norm_local.backward_reference, **backward),
                partial(norm_local.local_backward, kernel=True, **backward),
                [
                    (dy, x, gamma, *of_rows, *((dh,) if residual else ()))
                    for (x, dy, dh), of_rows in zip(sets, statistics_of, strict=True)
                ],
                3 + residual,
            )
        for variant, (xla, ours, arrays, moves) in variants.items():
            floor = moves * rows * cols * 2 / bandwidth * 1e6
            times = (microseconds(ours, arrays), microseconds(xla, arrays))
            found.append(Row(f"{name} {variant}", "bfloat16", (rows, cols), floor, *times))
    return found


def gemm_rows(m: int, n: int, k: int) -> list[Row]:
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    sets = [
        (draw(jax.random.key(2 * s), (m, k)), draw(jax.random.key(2 * s + 1), (k, n)))
        for s in range(SETS)
    ]
    bias = jnp.ones(n, jnp.bfloat16)
    plain = (so.gemm, jnp.matmul)
    fused = (
        lambda lhs, rhs: so.gemm(lhs, rhs, bias=bias, activation="gelu"),
        lambda lhs, rhs: jax.nn.gelu(lhs @ rhs + bias, approximate=True),
    )
    return [
        Row(name, "bfloat16", (m, n, k), 0.0, microseconds(ours, sets), microseconds(xla, sets))
        for name, (ours, xla) in {"none": plain, "bias, gelu": fused}.items()
    ]


def print_norms(rows: Sequence[Row]) -> None:
    print("| op | dtype | shape | floor µs | shardops µs (fraction) | XLA µs (fraction) |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(f"{t:.1f} ({row.floor / t:.2f})" for t in (row.shardops, row.xla))
        print(f"| {row.op} | {row.dtype} | {_shape(row)} | {row.floor:.1f} | {times} |")
    print()


def print_gemms(rows: Sequence[Row]) -> None:
    print("| dtype | m×n×k | epilogue | shardops TFLOP/s | XLA TFLOP/s |")
    print("|---|---|---|---|---|")
    for row in rows:
        operations = 2 * np.prod(row.shape)
        rates = " | ".join(f"{operations / t / 1e6:.1f}" for t in (row.shardops, row.xla))
        print(f"| {row.dtype} | {_shape(row)} | {row.op} | {rates} |")
    print()


def _shape(row: Row) -> str:
    return "×".join(map(str, row.shape))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
