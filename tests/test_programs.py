"""custom_partitioning in other settings: cached without its pointers, GSPMD, manual regions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
import json, sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import shardops as so

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
x, w = (rng.standard_normal(s).astype(np.float32) for s in ((8, 16, 32), (32, 64)))
junk = [object() for _ in range(int(sys.argv[1]))]  # other addresses than in the other process
with jax.set_mesh(mesh):
    xs = jax.device_put(x, NamedSharding(mesh, P("dp", None, "tp")))
    ws = jax.device_put(w, NamedSharding(mesh, P("tp")))
    events.clear()
    results = [
        jax.jit(lambda x, w: so.gemm(x, w, activation=a))(xs, ws) for a in (None, "relu", "silu")
    ]
want = [x @ w, np.maximum(x @ w, 0), x @ w / (1 + np.exp(-(x @ w)))]
print(json.dumps({
    "hits": sum(e.endswith("cache_hits") for e in events),
    "misses": sum(e.endswith("cache_misses") for e in events),
    "right": [bool(np.allclose(r, w, atol=1e-3)) for r, w in zip(results, want)],
}))
"""


def run(program, *arguments, **environment):
    """The JSON that `program` prints on 8 virtual devices."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def cached(folder, **more):
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        **more,
    }


def test_persistent_cache_tells_ops_apart_without_their_pointers(tmp_path):
    """The option that makes custom_partitioning cacheable drops the statics from its key."""
    option = {"JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1"}
    first = run(PROGRAM, "10", **cached(tmp_path, **option))
    second = run(PROGRAM, "99999", **cached(tmp_path, **option))
    assert first["right"] == second["right"] == [True] * 3
    assert second["hits"] == 3


MANUAL = """
import json, os
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import shardops as so

mesh = jax.make_mesh((2, 2, 2), ("pp", "dp", "tp"), axis_types=(AxisType.Auto,) * 3)
rng = np.random.default_rng(0)
x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 8, 16), (2, 16, 8)))
with jax.set_mesh(mesh):
    xs, ws = jax.device_put(x, P("pp", "dp", "tp")), jax.device_put(w, P("pp", "tp"))
    f = jax.shard_map(
        lambda x, w: so.gemm(so.rms_norm(x[0], jnp.ones(16)), w[0])[None],
        in_specs=P("pp"), out_specs=P("pp"), axis_names={"pp"},
    )
    got, eager = jax.jit(f)(xs, ws), f(xs, ws)
want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ w
print(json.dumps([bool(np.allclose(a, want, atol=1e-4)) for a in (got, eager)]))
"""


@pytest.mark.parametrize("shardy", ["1", "0"])
def test_partly_manual_region_with_and_without_shardy(shardy):
    """Jitted and eager. GSPMD cannot offer layouts there: jnp runs instead."""
    assert run(MANUAL, JAX_USE_SHARDY_PARTITIONER=shardy) == [True, True]


def test_gspmd_gives_the_same_values():
    """Shardy is JAX's default; where it is switched off, GSPMD asks for the result's sharding."""
    got = run(PROGRAM, "10", JAX_USE_SHARDY_PARTITIONER="0")
    assert got["right"] == [True] * 3
