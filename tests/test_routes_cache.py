"""A program that the shard_map route made can be exported, and is found in the persistent cache."""

import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests import cases, meshes
from tests.closeness import assert_shards_close


def test_export_round_trip_on_an_explicit_mesh(rng, explicit_mesh):
    """Value and gradient of a norm and a product over 8 devices, serialised and called again."""
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")
    x = cases.random(rng, (8, 16, 32))
    w, gamma = cases.random(rng, (32, 64), scale=0.2), cases.random(rng, (32,))

    def step(x, w, gamma):
        def loss(w, gamma):
            return jnp.sum(jnp.sin(so.gemm(so.layer_norm(x, gamma), w)))

        return jax.value_and_grad(loss, (0, 1))(w, gamma)

    placed = (
        meshes.place(explicit_mesh, x, "dp"),
        meshes.place(explicit_mesh, w, None, "tp"),
        meshes.place(explicit_mesh, gamma),
    )
    jitted = jax.jit(step)
    want = jitted(*placed)
    blob = jax.export.export(jitted)(*placed).serialize()
    got = jax.jit(jax.export.deserialize(blob).call)(*placed)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_shards_close(one, np.asarray(other), reduced=32)


PROGRAM = """
import jax, jax.numpy as jnp, shardops as so
from jax.sharding import PartitionSpec as P, AxisType, NamedSharding
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((8, 32)), NamedSharding(mesh, P("dp", "tp")))
    w = jax.device_put(jnp.ones((32, 64)), NamedSharding(mesh, P("tp")))
    step = jax.jit(lambda x, w: jax.grad(lambda w: so.gemm(x, w, activation="gelu").sum())(w))
    step(x, w).block_until_ready()
"""


def test_persistent_cache_is_hit_by_a_second_process(tmp_path):
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    entries = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        entries.append(sorted(p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")))
    assert any("lambda" in name for name in entries[0]), entries[0]
    assert entries[1] == entries[0]
