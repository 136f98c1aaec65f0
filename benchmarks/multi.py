"""Times sharded products over the GPUs of this host, beside XLA's partitioning of plain jnp.

    python benchmarks/multi.py [--devices 2,4,8] [--size 8192] [--json FILE] [--pictures DIR]

A time is the wall time of a step in a chain of steps back to back, so collectives overlap with
products as far as XLA lets them. Beside it: the local product alone on one device, the collectives
alone, and what `so.explain` predicts for the link. Strong scaling keeps the product's size, weak
scaling has it grow with the devices. Prints tables for docs/measured.md.
On a CPU it runs tiny shapes on virtual devices: a smoke test, not a measurement.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, NamedSharding

import shardops as so
from shardops import hlo
from shardops.rules.spec import local_shape

# name: specs of x [tokens, k], w [k, n] and the result
LAYOUTS = {
    "column": (P(), P(None, "tp"), P(None, "tp")),
    "row, all-reduced": (P(None, "tp"), P("tp"), P()),
    "row, scattered": (P(None, "tp"), P("tp"), P("tp")),
    "sequence, column": (P("tp"), P(None, "tp"), P(None, "tp")),
    "fsdp": (P("tp"), P("tp"), P("tp")),
}
REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One layout on some devices: microseconds of a step."""

    layout: str
    direction: str  # forward | forward and backward
    scaling: str  # strong | weak
    devices: int
    shape: tuple[int, int, int]  # tokens, k, n
    shardops: float
    xla: float
    product: float  # the local products alone
    collectives: float  # the collectives alone
    predicted: float  # of the collectives, by explain
    received: float  # bytes a device

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a device receives in the collectives alone."""
        return self.received / self.collectives * 1e6 if self.collectives else 0.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="numbers of devices; default: 2, 4, ... up to all")
    parser.add_argument("--size", type=int, default=8192, help="tokens, k and n on two devices")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--pictures", type=pathlib.Path, metavar="DIR")
    options = parser.parse_args(arguments)
    found = jax.devices()
    on_gpu = found[0].platform == "gpu"
    if len(found) < 2:
        print("bench-multi: one device; expected at least 2. On a CPU set "
              "XLA_FLAGS=--xla_force_host_platform_device_count=8.", file=sys.stderr)  # fmt: skip
        return 2
    size = options.size if on_gpu else 128
    counts = [int(n) for n in options.devices.split(",")] if options.devices else _doublings(found)
    print(
        f"{len(found)} x {found[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    if not on_gpu:
        print("A CPU run: tiny shapes, virtual devices. These times say nothing about GPUs.")
    rows = [
        measure(name, backward, scaling, n, size)
        for n in counts
        for scaling in ("strong", "weak")
        if scaling == "strong" or n > 2
        for backward in (False, True)
        for name in LAYOUTS
    ]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.pictures:
        draw(rows, options.pictures)
    return 0


def _doublings(devices: Sequence[Any]) -> list[int]:
    return [n for n in (2, 4, 8, 16) if n <= len(devices)]


def measure(name: str, backward: bool, scaling: str, n: int, size: int) -> Row:
    """All figures of one layout."""
    mesh = jax.make_mesh((n,), ("tp",), (AxisType.Explicit,), devices=jax.devices()[:n])
    specs = LAYOUTS[name]
    shape = [size, size, size]
    if scaling == "weak":  # the dim that is sharded grows: tokens, else that of w
        shape[0 if specs[0] == P("tp") else 1 if specs[1] == P("tp") else 2] *= n // 2
    tokens, k, cols = shape
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        x, w, dy = (
            jax.device_put(
                jnp.asarray(rng.standard_normal(dims, np.float32) / dims[0] ** 0.5, jnp.bfloat16),
                NamedSharding(mesh, spec),
            )
            for dims, spec in zip(((tokens, k), (k, cols), (tokens, cols)), specs, strict=True)
        )
        ours = lambda x, w: so.gemm(x, w, out_sharding=specs[2])  # noqa: E731
        step = _step(ours, backward)
        compiled = jax.jit(step).lower(x, w, dy).compile()
        report = so.explain(step)(x, w, dy)
        received = sum(hlo.received_bytes(c) for c in hlo.collectives(compiled))
        time_ours = chained(compiled, x, w, dy)
        alone = chained(*_collectives_alone(hlo.collectives(compiled), n)) if received else 0.0
    auto = jax.make_mesh((n,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:n])
    with jax.set_mesh(auto):
        x, w, dy = (
            jax.device_put(np.asarray(a), NamedSharding(auto, spec))
            for a, spec in zip((x, w, dy), specs, strict=True)
        )
        layouts = [NamedSharding(auto, spec) for spec in specs]
        outs = layouts[2] if not backward else (layouts[2], layouts[0], layouts[1])
        plain = jax.jit(_step(jnp.matmul, backward), in_shardings=layouts, out_shardings=outs)
        time_xla = chained(plain, x, w, dy)
    return Row(
        name,
        "forward and backward" if backward else "forward",
        scaling,
        n,
        (tokens, k, cols),
        time_ours,
        time_xla,
        sum(_product_alone(entry) for entry in report.entries),
        alone,
        report.microseconds,
        received,
    )


def _step(product: Callable[..., jax.Array], backward: bool) -> Callable[..., Any]:
    if not backward:
        return lambda x, w, dy: product(x, w)

    def both(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(product, x, w)
        return y, *pull(dy)

    return both


def _product_alone(entry: Any) -> float:
    """The local share of one product, on one device."""
    sizes, op = dict(entry.record.sizes), entry.record.op
    shapes = [local_shape(held.shape, held.used, sizes) for held in entry.operands[:2]]
    lhs, rhs = (jax.device_put(np.full(s, 0.01, jnp.bfloat16), jax.devices()[0]) for s in shapes)
    dims = (op.contracting, op.batch)
    return chained(jax.jit(lambda a, b: jax.lax.dot_general(a, b, dims)), lhs, rhs)


def _collectives_alone(found: Sequence[hlo.Collective], n: int) -> tuple[Any, ...]:
    """A program of these collectives and nothing else, and its operands."""
    operands, moves = [], []
    for c in found:
        count = c.bytes // 2  # elements of the result, in bfloat16
        if c.kind == "all-gather":
            operands.append(count)
            moves.append(lambda a: jax.lax.all_gather(a, "tp", tiled=True))
        elif c.kind == "all-reduce":
            operands.append(count * n)
            moves.append(lambda a: jax.lax.psum(a, "tp"))
        elif c.kind == "reduce-scatter":
            operands.append(count * n * n)
            moves.append(lambda a: jax.lax.psum_scatter(a, "tp", tiled=True))
        elif c.kind == "all-to-all":
            operands.append(count * n)
            moves.append(lambda a: jax.lax.all_to_all(a, "tp", 0, 0, tiled=True))
        else:
            raise ValueError(f"bench-multi: {c.kind}; expected a collective of a product's plan")

    def body(*arrays: jax.Array) -> list[jax.Array]:
        return [move(a) for move, a in zip(moves, arrays, strict=True)]

    mesh = jax.sharding.get_mesh()
    mapped = jax.shard_map(
        body,
        in_specs=(P("tp"),) * len(found),
        out_specs=[P("tp")] * len(found),
        check_vma=False,  # what is gathered or summed is the same everywhere, and not looked at
    )
    arrays = [
        jax.device_put(jnp.ones(c, jnp.bfloat16), NamedSharding(mesh, P("tp"))) for c in operands
    ]
    return jax.jit(mapped), *arrays


def chained(program: Callable[..., Any], *arrays: jax.Array) -> float:
    """Microseconds of one of many calls back to back; the median of a few rounds."""
    for _ in range(3):
        jax.block_until_ready(program(*arrays))
    start = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    calls = int(np.clip(0.05 / (time.perf_counter() - start), 3, 100))
    rounds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            results = program(*arrays)
        jax.block_until_ready(results)
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(rounds)


def show(rows: Sequence[Row]) -> None:
    print(
        "| layout | direction | scaling | GPUs | tokens×k×n | shardops µs | XLA µs | product alone "
        "| collectives alone (GB/s) | predicted | hidden |\n|" + "---|" * 11
    )
    for r in rows:
        hidden = (r.product + r.collectives - r.shardops) / r.collectives if r.collectives else 0.0
        print(
            f"| {r.layout} | {r.direction} | {r.scaling} | {r.devices} "
            f"| {'×'.join(map(str, r.shape))} | {r.shardops:.1f} | {r.xla:.1f} | {r.product:.1f} "
            f"| {r.collectives:.1f} ({r.bandwidth / 1e9:.0f}) | {r.predicted:.1f} | {hidden:.0%} |"
        )


def draw(rows: Sequence[Row], folder: pathlib.Path) -> None:
    """Strong and weak scaling of each layout, forward and backward together."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for scaling in ("strong", "weak"):
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for name in LAYOUTS:
            # On two devices weak scaling starts where strong scaling does.
            points = sorted(
                (r.devices, _flops(r) / r.shardops / 1e6)
                for r in rows
                if r.layout == name
                and r.direction != "forward"
                and (r.scaling == scaling or r.devices == 2)
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel="GPUs", ylabel="TFLOP/s of all GPUs", title=f"{scaling} scaling, bfloat16")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(folder / f"scaling_{scaling}.png", dpi=110)
        pyplot.close(figure)


def _flops(row: Row) -> float:
    tokens, k, n = row.shape
    return 2.0 * tokens * k * n * (1 if row.direction == "forward" else 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
