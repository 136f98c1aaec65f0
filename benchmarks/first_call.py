"""What a fresh process pays, as JSON on standard output: run by overheads.py.

    python benchmarks/first_call.py rms_norm|jnp|gradient    one jitted function, its first call in
                                                             parts; gradient: of rms_norm
    python benchmarks/first_call.py cold <KERNELS    each kernel, NVRTC loaded before
    python benchmarks/first_call.py disk <KERNELS    each kernel

JAX, its GPU, shardops and the arguments are there before the clock starts.
"""

import itertools
import json
import sys
import time
from typing import Any


def main(what: str) -> int:
    if what in ("cold", "disk"):
        facts = each_kernel(json.load(sys.stdin), what == "cold")
    else:
        facts = first_call(what)
    from shardops.kernels import compile  # a first call imports it by itself

    json.dump(facts | {"counts": vars(compile.counts)}, sys.stdout)
    return 0


def first_call(op: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import shardops as so
    from overheads import jnp_rms_norm

    def gradient(x: jax.Array, gamma: jax.Array) -> Any:
        return jax.vjp(so.rms_norm, x, gamma)[1](x)

    x = jax.random.normal(jax.random.key(0), (8192, 4096), jnp.bfloat16)
    gamma = jnp.ones(4096, jnp.bfloat16)
    functions = {"rms_norm": so.rms_norm, "jnp": jnp_rms_norm, "gradient": gradient}
    jax.block_until_ready((x + x, gamma))
    times = [time.perf_counter()]
    lowered = jax.jit(functions[op]).lower(x, gamma)
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    jax.block_until_ready(compiled(x, gamma))
    times.append(time.perf_counter())
    parts = [after - before for before, after in itertools.pairwise(times)]
    return {"first call": sum(parts), **dict(zip(("lower", "XLA", "run"), parts, strict=True))}


def each_kernel(asked: dict[str, Any], load: bool) -> dict[str, Any]:
    from shardops.kernels import compile

    start = time.perf_counter()
    if load:
        compile.check_arch(asked["arch"])
    loading = time.perf_counter() - start
    seconds = []
    for file, name, constants in asked["kernels"]:
        pairs = tuple((macro, value) for macro, value in constants)
        start = time.perf_counter()
        compile.cubin(file, name, pairs, asked["arch"])
        seconds.append(time.perf_counter() - start)
    return {"loading": loading, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
