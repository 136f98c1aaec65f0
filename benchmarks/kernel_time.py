"""The time of an op on the device, by the kernels that a profile shows."""

import pathlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def microseconds(op: Callable[..., Any], sets: Sequence[Sequence[jax.Array]]) -> float:
    """The kernel time of one op; on a CPU, the wall time of calls back to back.

    One jitted function holds the op a few times, each on arrays of its own that together are much
    larger than the caches. Of each kernel the median duration counts, times its runs an op.
    """
    step = jax.jit(lambda sets: [op(*arrays) for arrays in sets])
    for _ in range(3):  # compiles, then grows the memory pool and raises the clocks
        jax.block_until_ready([step(sets) for _ in range(4)])
    start = time.perf_counter()
    jax.block_until_ready(step(sets))
    calls = int(np.clip(0.03 / (time.perf_counter() - start), 3, 50))
    if jax.devices()[0].platform != "gpu":
        return _wall(step, sets, calls)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                results = step(sets)
            jax.block_until_ready(results)
        kernels = kernel_durations(pathlib.Path(folder))
    ops = calls * len(sets)
    return sum(statistics.median(times) * round(len(times) / ops, 2) for times in kernels.values())


def kernel_durations(folder: pathlib.Path) -> dict[str, list[float]]:
    """Microseconds of each run of each kernel and copy on the device's streams, by name."""
    [profile] = folder.rglob("*.xplane.pb")
    found: dict[str, list[float]] = defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(profile)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):  # the other lines repeat them by module and by op
                for event in line.events:
                    found[event.name].append(event.duration_ns / 1e3)
    if not found:
        raise RuntimeError(
            "bench: the profile has no kernel; expected those of the op. Is CUPTI there?"
        )
    return found


def _wall(step: Callable[..., Any], sets: Sequence[Sequence[jax.Array]], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(step(sets))
    return (time.perf_counter() - start) / (calls * len(sets)) * 1e6
