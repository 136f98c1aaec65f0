"""Time of programs over several devices: in a chain, by a profile, of their collectives alone."""

import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from shardops import hlo

REPEATS = 3
SECONDS = 0.03  # of calls in one round
# What XLA offers to have collectives run beside products: products taken apart along what is
# gathered or scattered ("windowed einsum"), and a schedule that starts collectives early.
OVERLAPPING = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_multi_streamed_windowed_einsum": True,
}

Interval = tuple[float, float]


@dataclass(frozen=True)
class Program:
    """A compiled program and its operands."""

    compiled: Callable[..., Any]
    operands: tuple[Any, ...]

    @classmethod
    def of(cls, f: Callable[..., Any], *operands: Any, options: Any = None, **jit: Any) -> Any:
        lowered = jax.jit(f, **jit).lower(*operands)
        return cls(lowered.compile(compiler_options=options), operands)

    def __call__(self) -> Any:
        return self.compiled(*self.operands)


def by_xla(
    devices: int, f: Callable[..., Any], *operands: Any, overlapping: bool = True, **jit: Any
) -> dict[str, Program]:
    """Plain jnp as XLA compiles it by default, and with `OVERLAPPING` where that compiles."""
    found = {"XLA": Program.of(f, *operands, **jit)}
    if devices > 1 and overlapping:
        try:
            found["XLA, overlapping"] = Program.of(f, *operands, options=OVERLAPPING, **jit)
        except jax.errors.JaxRuntimeError as error:
            # Seen in JAX 0.11.2: a gathered operand that two products share.
            print(f"XLA, overlapping, does not compile: {str(error)[:200]}", file=sys.stderr)
    return found


def mesh_of(n: int, kind: AxisType = AxisType.Explicit) -> Mesh:
    """The first n devices along tp."""
    return jax.make_mesh((n,), ("tp",), (kind,), devices=jax.devices()[:n])


def drawn(
    mesh: Mesh, shape: tuple[int, ...], spec: P, scale: float = 1.0, dtype: Any = jnp.bfloat16
) -> jax.Array:
    """Normal numbers, or random bits of an integer type, made where they are to lie."""

    def draw(key: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.bits(key, shape, dtype)
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    make = jax.jit(draw, out_shardings=NamedSharding(mesh, spec))
    return make(jax.random.key(len(shape) + shape[-1]))


def chained(program: Program) -> float:
    """Microseconds of one of many calls back to back; the median of a few rounds."""
    for _ in range(3):
        jax.block_until_ready(program())
    calls = _calls(program)
    on_gpu = jax.devices()[0].platform == "gpu"
    rounds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            results = program()
            if not on_gpu:  # virtual devices share threads, for which two programs may wait
                jax.block_until_ready(results)
        jax.block_until_ready(results)
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(rounds)


def _calls(program: Program) -> int:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return int(np.clip(SECONDS / (time.perf_counter() - start), 3, 100))


# ---- by a profile --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """What a device does in a call, in microseconds, by a profile; the mean of the devices."""

    kernels: float  # some kernel runs that is no collective
    collectives: float  # some collective runs, the wait for the other devices included
    both: float  # of these: the time in which a kernel runs too


def beside(program: Program) -> Beside | None:
    """What runs beside what. None without a GPU."""
    if jax.devices()[0].platform != "gpu":
        return None
    jax.block_until_ready(program())
    calls = max(3, _calls(program) // 4)
    totals = []
    for events in profiled(program, calls):
        split: dict[bool, list[Interval]] = {True: [], False: []}
        for name, start, end in events:
            split[is_collective(name)].append((start, end))
        collective, kernel = _merged(split[True]), _merged(split[False])
        totals.append((_length(kernel), _length(collective), _common(kernel, collective)))
    kernels, collectives, both = (statistics.mean(of) / calls for of in zip(*totals, strict=True))
    return Beside(kernels, collectives, both)


def is_collective(name: str) -> bool:
    """NCCL's kernels, XLA's own, and copies from one device to another."""
    return any(part in name.lower() for part in ("nccl", "allreduce", "all_reduce", "p2p"))


def profiled(program: Program, calls: int) -> Iterator[list[tuple[str, float, float]]]:
    """Of each device, name, start and end of each kernel of so many calls, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                results = program()
            jax.block_until_ready(results)
        [profile] = pathlib.Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(profile)).planes:
            if plane.name.startswith("/device:GPU"):
                found = [
                    (e.name, e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3)
                    for line in plane.lines
                    if line.name.startswith("Stream")  # others repeat them by module and by op
                    for e in line.events
                ]
                if found:  # a device that takes no part has a plane too
                    yield sorted(found, key=lambda event: event[1])


def _merged(spans: Sequence[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def _length(spans: Sequence[Interval]) -> float:
    return sum(end - start for start, end in spans)


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    return _length(one) + _length(other) - _length(_merged([*one, *other]))


# ---- collectives alone ---------------------------------------------------------------------------


def alone(found: Sequence[hlo.Collective], mesh: Mesh) -> Program | None:
    """A program of collectives of these kinds and sizes and nothing else; None where none are."""
    n = mesh.size
    moves, operands = [], []
    for c in found:
        dtype = jnp.uint8 if c.dtype.startswith("f8") else jnp.bfloat16
        power, move = _MOVES[c.kind]
        pieces = -(-c.bytes // (jnp.dtype(dtype).itemsize * n))
        moves.append(move)
        operands.append(drawn(mesh, (pieces * n ** (power + 1),), P("tp"), dtype=dtype))
    if not moves:
        return None

    def body(*arrays: jax.Array) -> list[jax.Array]:
        return [move(a) for move, a in zip(moves, arrays, strict=True)]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            body,
            in_specs=(P("tp"),) * len(moves),
            out_specs=[P("tp")] * len(moves),
            check_vma=False,  # what is gathered or summed is the same everywhere, and not looked at
        )
        return Program.of(mapped, *operands)


# How each kind moves, and by what power of the devices the whole operand has more elements than
# the result has on a device.
_MOVES: dict[str, tuple[int, Callable[[jax.Array], jax.Array]]] = {
    "all-gather": (0, lambda a: jax.lax.all_gather(a, "tp", tiled=True)),
    "all-reduce": (1, lambda a: jax.lax.psum(a, "tp")),
    "reduce-scatter": (2, lambda a: jax.lax.psum_scatter(a, "tp", tiled=True)),
    "all-to-all": (1, lambda a: jax.lax.all_to_all(a, "tp", 0, 0, tiled=True)),
    "collective-permute": (1, lambda a: jax.lax.ppermute(a, "tp", _ring())),
}


def _ring() -> list[tuple[int, int]]:
    n = jax.lax.axis_size("tp")
    return [(i, (i + 1) % n) for i in range(n)]


def one_collective(kind: str, received: int, mesh: Mesh) -> Program:
    """One in which each device receives so many bytes of bfloat16."""
    n = mesh.size
    # Elements of the whole operand, whose nth part a device holds.
    whole = {
        "all-gather": received * n // (n - 1),
        "all-reduce": received * n * n // (2 * (n - 1)),
        "reduce-scatter": received * n * n // (n - 1),
        "all-to-all": received * n * n // (n - 1),
        "collective-permute": received * n,
    }[kind] // (2 * n * n)
    operand = drawn(mesh, (whole * n * n,), P("tp"))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            _MOVES[kind][1], in_specs=P("tp"), out_specs=P("tp"), check_vma=False
        )
        return Program.of(mapped, operand)


def last_to_come(program: Program, calls: int = 12) -> float:
    """Microseconds of a collective once all devices are there: of the kernels of one call the time
    on the device that came last; the median of the calls. Wall time without a GPU."""
    for _ in range(3):
        jax.block_until_ready(program())
    if jax.devices()[0].platform != "gpu":
        return chained(program)
    durations = []
    for events in profiled(program, calls):
        each = len(events) // calls
        times = [end - start for _, start, end in events]
        durations.append([sum(times[i : i + each]) for i in range(0, each * calls, each)])
    return statistics.median(min(of) for of in zip(*durations, strict=True))
