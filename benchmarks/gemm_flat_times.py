"""Times products of short contractions: by their kernel, by cuBLASLt, by XLA and by torch.

    python benchmarks/gemm_flat_times.py [--rounds 2]

bfloat16. "kernel" is so.gemm with the kernel of gemm_flat.py, whether or not it is taken for that
size by default; "cuBLASLt" is so.gemm without it. Microseconds as gemm_times.py takes them, medians
of the rounds, in which all take turns; "gain": the least of the others over the kernel. Needs a GPU
of sm_90.
"""

import argparse
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import gemm_times
import shardops as so
from shardops.kernels import gemm_flat

AS_THEY_ARE = ((1,), (0,))
PROBLEMS = (  # m, n, k, contracting dims
    (8192, 8192, 64, AS_THEY_ARE),
    (8192, 8192, 64, ((0,), (0,))),
    (8192, 8192, 64, ((1,), (1,))),
    (8192, 8192, 32, ((0,), (1,))),
    *((8192, 8192, k, AS_THEY_ARE) for k in (48, 32, 16, 8)),
    *((m, n, 64, AS_THEY_ARE) for m, n in ((16384, 4096), (4096, 16384), (8192, 28672))),
    *((m, n, 64, AS_THEY_ARE) for m, n in ((16384, 8192), (8192, 4096), (4096, 4096))),
    *((m, n, 32, AS_THEY_ARE) for m, n in ((16384, 4096), (4096, 4096), (8192, 2048))),
    *((m, n, 16, AS_THEY_ARE) for m, n in ((4096, 28672), (4096, 4096), (2048, 2048))),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    print("| m×n×k | lhs, rhs | kernel | TB/s | cuBLASLt | XLA | torch | gain |")
    print("|---|---|---|---|---|---|---|---|")
    with gemm_times.Torch() as torch:
        for problem in PROBLEMS:
            print(line(*problem, measure(*problem, torch, rounds)), flush=True)


def measure(
    m: int, n: int, k: int, dims: Any, torch: gemm_times.Torch, rounds: int
) -> dict[str, float]:
    turned = dims[0] == (0,), dims[1] == (1,)
    sets = [
        tuple(a.T if turn else a for a, turn in zip(pair, turned, strict=True))
        for pair in gemm_times.operands(m, n, k, "bfloat16")
    ]

    def compiled(product: Any) -> Any:
        jax.clear_caches()
        return jax.jit(lambda sets: [product(x, w) for x, w in sets]).lower(sets).compile()

    steps = {}
    for name, least in (("kernel", 1), ("cuBLASLt", 1 << 60)):
        with taken_from(least):
            steps[name] = compiled(lambda x, w: so.gemm(x, w, contracting_dims=dims))
    steps["XLA"] = compiled(lambda x, w: jax.lax.dot_general(x, w, (dims, ((), ()))))
    times = defaultdict(list)
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(gemm_times.microseconds(step, sets))
        theirs = torch.measure(m, n, k, "bfloat16") if dims == AS_THEY_ARE else None
        if theirs is not None:
            times["torch"].append(theirs)
    return {name: statistics.median(found) for name, found in times.items()}


@contextlib.contextmanager
def taken_from(elements: int) -> Iterator[None]:
    """The kernel makes products with so many elements or more in their result."""
    before = gemm_flat._LEAST
    gemm_flat._LEAST = {gemm_flat.LONGEST: (1, elements)}
    try:
        yield
    finally:
        gemm_flat._LEAST = before


def line(m: int, n: int, k: int, dims: Any, times: dict[str, float]) -> str:
    lies = "[k, m]" if dims[0] == (0,) else "[m, k]", "[n, k]" if dims[1] == (1,) else "[k, n]"
    kernel = times.pop("kernel")
    size = jnp.dtype(jnp.bfloat16).itemsize * (m * n + m * k + k * n)
    cells = [
        f"{times[name]:.2f}" if name in times else "–" for name in ("cuBLASLt", "XLA", "torch")
    ]
    return (
        f"| {m}×{n}×{k} | {', '.join(lies)} | {kernel:.2f} | {size / kernel / 1e6:.2f} "
        f"| {' | '.join(cells)} | {min(times.values()) / kernel:.3f} |"
    )


if __name__ == "__main__":
    main()
