"""Times the kernels beside XLA's code for the same mathematics and PyTorch's, on this machine.

    python benchmarks/bench.py [--only norms|small|softmax|small-softmax|gemm|overheads]
        [--json FILE]

A time is the time of the op's kernels in a profile of back-to-back calls (kernel_time.py); the gaps
between kernels and the host's time do not count: they are overheads.py's, printed last.

floor = the bytes that must move (inputs as far as they are seen, once, outputs once) / the copy
bandwidth of this run. XLA = the jnp reference under jit, GEMM: jnp.matmul. torch = its own op
(torch_times.py), where there is one. Prints tables for docs/measured.md.
Without a GPU it runs tiny shapes on the reference path: a smoke test, not a measurement.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import jax
import jax.numpy as jnp

import shardops as so
from kernel_time import microseconds
from shardops.primitives import norm_local, softmax_local

NORM_SHAPES = (
    (16384, 1024), (16384, 2048), (16384, 4096), (8192, 8192),
    (8192, 5120), (8192, 7168), (4096, 12288), (8192, 3000),
)  # fmt: skip
SMALL_LENGTHS = (256, 1000, 1024, 2048, 3000, 4096, 8192, 12288, 16384, 20480, 32768, 65536)
SMALL_NORMS = tuple(((2 << 20) // cols, cols) for cols in SMALL_LENGTHS)  # 4 MiB of x
SMALL_SOFTMAX = (
    *(("plain", (1, *at)) for at in SMALL_NORMS),
    *(("causal", ((2 << 20) // n**2, n, n)) for n in (256, 1024)),
)
SOFTMAX_SHAPES = (
    ("plain", (64, 2048, 2048)), ("plain", (128, 1024, 1024)),
    ("causal", (4, 16, 2048, 2048)), ("causal", (8, 16, 1024, 1024)),
    ("masked", (4, 16, 2048, 2048)), ("masked", (8, 16, 1024, 1024)),
)  # fmt: skip
GEMM_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336))
TINY_NORMS, TINY_GEMMS = ((64, 96),), ((64, 96, 32),)
TINY_SOFTMAX = tuple((kind, (2, 2, 8, 24)) for kind in ("plain", "causal", "masked"))
SECTIONS = ("norms", "small", "softmax", "small-softmax", "gemm", "overheads")
SETS = 4  # copies of the op, each with its own arrays; of small ones more, past the caches
SMALL_SETS = 24
EPSILON = 1e-6
SCALE = 0.125


@dataclass(frozen=True)
class Row:
    """One line of a table: microseconds of one op; None where nothing of the kind was timed."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    floor: float
    shardops: float
    xla: float
    torch: float | None = None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="also write the rows here"
    )
    options = parser.parse_args(arguments)
    wanted = SECTIONS if options.only is None else (options.only,)
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    print(f"{device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}")
    if not on_gpu:
        print("A CPU run: tiny shapes, reference path. These times say nothing about the kernels.")
    norms = NORM_SHAPES if on_gpu else TINY_NORMS
    softmaxes = SOFTMAX_SHAPES if on_gpu else TINY_SOFTMAX
    torch_times = {}
    if on_gpu and {"norms", "softmax"} & {*wanted}:
        torch_times = torch_microseconds(
            norms if "norms" in wanted else (), softmaxes if "softmax" in wanted else ()
        )
    bandwidth = copy_bandwidth(2**30 if on_gpu else 2**20)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n")
    facts = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "copy_bytes_per_second": bandwidth,
    }
    if "norms" in wanted:
        found = [row for shape in norms for row in norm_rows(*shape, bandwidth, torch_times)]
        facts["norms"] = print_ops(found)
    if "small" in wanted and on_gpu:
        found = [row for at in SMALL_NORMS for row in norm_rows(*at, bandwidth, {}, SMALL_SETS)]
        facts["small"] = print_ops(found)
    if "softmax" in wanted:
        found = [row for each in softmaxes for row in softmax_rows(*each, bandwidth, torch_times)]
        facts["softmax"] = print_ops(found)
    if "small-softmax" in wanted and on_gpu:
        found = [
            row for each in SMALL_SOFTMAX for row in softmax_rows(*each, bandwidth, {}, SMALL_SETS)
        ]
        facts["small-softmax"] = print_ops(found)
    if "gemm" in wanted:
        shapes = GEMM_SHAPES if on_gpu else TINY_GEMMS
        facts["gemm"] = print_gemms([row for shape in shapes for row in gemm_rows(*shape)])
    if "overheads" in wanted and on_gpu:
        import overheads

        facts["overheads"] = overheads.print_rows(overheads.measured(overheads.LENGTHS))
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def torch_microseconds(norms: Sequence, softmaxes: Sequence) -> dict[str, float]:
    """PyTorch's times by op and shape; says why where there are none."""
    script = pathlib.Path(__file__).with_name("torch_times.py")
    asked = json.dumps({"norms": norms, "softmax": softmaxes})
    done = subprocess.run(
        [sys.executable, str(script)], input=asked, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"torch: no times ({reason})")
        return {}
    found = json.loads(done.stdout)
    print(f"torch {found['version']}")
    return found["microseconds"]


def copy_bandwidth(size: int) -> float:
    """Bytes read and written a second: the better of a copy and of an elementwise kernel."""
    sets = [(jnp.full(size // 4, 1.5, jnp.float32),) for _ in range(2)]
    time = min(microseconds(jnp.copy, sets), microseconds(jnp.negative, sets))
    return 2 * size / time * 1e6


def norm_rows(
    rows: int, cols: int, bandwidth: float, torch_times: dict[str, float], count: int = SETS
) -> Iterator[Row]:
    """Forward, backward and backward with a residual's cotangent, of both norms."""
    draw = partial(jax.random.normal, shape=(rows, cols), dtype=jnp.bfloat16)
    sets = [[draw(jax.random.key(3 * s + i)) for i in range(3)] for s in range(count)]
    gamma, beta = jnp.ones(cols, jnp.bfloat16), jnp.zeros(cols, jnp.bfloat16)
    timed = partial(_timed, shape=(rows, cols), bandwidth=bandwidth, torch_times=torch_times)
    for kind, name in (("rms", "rms_norm"), ("layer", "layer_norm")):
        statics = {"kind": kind, "beta": kind == "layer", "zero_centered_gamma": False}
        shift = (beta,) if kind == "layer" else ()
        forward = {**statics, "add": False, "epsilon": EPSILON}
        reference = partial(norm_local.forward_reference, **forward)
        kernel = partial(norm_local.local_forward, kernel=True, **forward)
        statistics_of = [jax.jit(reference)(x, gamma, *shift)[1:] for x, _, _ in sets]
        operands = [(x, gamma, *shift) for x, _, _ in sets]
        yield timed(f"{name} forward", kernel, reference, operands, moved=2 * rows * cols * 2)
        for residual in (False, True):
            backward = {**statics, "residual": residual}
            yield timed(
                f"{name} backward, add" if residual else f"{name} backward",
                partial(norm_local.local_backward, kernel=True, **backward),
                partial(norm_local.backward_reference, **backward),
                [
                    (dy, x, gamma, *of_rows, *((dh,) if residual else ()))
                    for (x, dy, dh), of_rows in zip(sets, statistics_of, strict=True)
                ],
                moved=(3 + residual) * rows * cols * 2,
            )


def softmax_rows(
    kind: str,
    shape: tuple[int, ...],
    bandwidth: float,
    torch_times: dict[str, float],
    count: int = SETS,
) -> Iterator[Row]:
    """Forward and backward. The mask is one for all heads; its backward is that without a mask."""
    draw = partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    timed = partial(_timed, shape=shape, bandwidth=bandwidth, torch_times=torch_times)
    *batch, queries, keys = shape
    pairs = sum(min(q + 1, keys) for q in range(queries)) if kind == "causal" else queries * keys
    seen, all_of = 2 * math.prod(batch) * pairs, 2 * math.prod(shape)  # bytes
    masks = ()
    if kind == "masked":
        masks = (jax.random.uniform(jax.random.key(99), (shape[0], 1, queries, keys)) < 0.3,)
    statics = {"scale": SCALE, "diagonal": 0 if kind == "causal" else None, "first": False}
    forward = {**statics, "mask": bool(masks)}
    yield timed(
        f"softmax {kind} forward",
        partial(softmax_local.local_forward, kernel=True, **forward),
        partial(softmax_local.forward_reference, **forward),
        [(draw(jax.random.key(s)), *masks) for s in range(count)],
        moved=seen + all_of + sum(mask.size for mask in masks),
    )
    if masks:
        return
    yield timed(
        f"softmax {kind} backward",
        partial(softmax_local.local_backward, kernel=True, **statics),
        partial(softmax_local.backward_reference, **statics),
        [(draw(jax.random.key(2 * s)), draw(jax.random.key(2 * s + 1))) for s in range(count)],
        moved=2 * seen + all_of,
    )


def _timed(
    op: str,
    ours: Callable[..., object],
    xla: Callable[..., object],
    operands: Sequence[Sequence[jax.Array]],
    *,
    moved: int,
    shape: tuple[int, ...],
    bandwidth: float,
    torch_times: dict[str, float],
) -> Row:
    return Row(
        op,
        "bfloat16",
        shape,
        moved / bandwidth * 1e6,
        microseconds(ours, operands),
        microseconds(xla, operands),
        torch_times.get(f"{op} {[*shape]}"),
    )


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


def print_ops(rows: Sequence[Row]) -> list[dict]:
    """Prints what is bound by memory. Returns the rows as data."""
    print("| op | dtype | shape | floor µs | shardops µs (fraction) | XLA µs | torch µs |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        times = (row.shardops, row.xla, row.torch)
        cells = ("–" if t is None else f"{t:.1f} ({row.floor / t:.2f})" for t in times)
        print(f"| {row.op} | {row.dtype} | {_shape(row)} | {row.floor:.1f} | {' | '.join(cells)} |")
    print()
    return [asdict(row) for row in rows]


def print_gemms(rows: Sequence[Row]) -> list[dict]:
    """Likewise, by the rate of operations."""
    print("| dtype | m×n×k | epilogue | shardops TFLOP/s | XLA TFLOP/s |")
    print("|---|---|---|---|---|")
    for row in rows:
        operations = 2 * math.prod(row.shape)
        rates = " | ".join(f"{operations / t / 1e6:.1f}" for t in (row.shardops, row.xla))
        print(f"| {row.dtype} | {_shape(row)} | {row.op} | {rates} |")
    print()
    return [asdict(row) for row in rows]


def _shape(row: Row) -> str:
    return "×".join(map(str, row.shape))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
