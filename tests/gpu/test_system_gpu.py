"""Whole programs on a GPU: export, the persistent cache, a mocked topology, the demo."""

import json

import jax
import jax.numpy as jnp
import numpy as np

import shardops as so
from tests.gpu.programs import run


def block(x, gamma, weight):
    return so.gemm(so.rms_norm(x, gamma), weight, activation="gelu")


def test_exported_program_runs_after_a_round_trip(rng):
    x, gamma, weight = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((64, 512), (512,), (512, 256))
    )
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"shardops_{name}")
        for name in ("launch", "gemm")
    ]
    exported = jax.export.export(jax.jit(block), disabled_checks=checks)(x, gamma, weight)
    again = jax.export.deserialize(exported.serialize())
    want = jax.jit(block)(x, gamma, weight)
    np.testing.assert_array_equal(np.asarray(again.call(x, gamma, weight)), np.asarray(want))


CACHED = """
import json, jax, jax.numpy as jnp, shardops as so
from jax.sharding import AxisType, PartitionSpec as P
counts = {"hits": 0, "misses": 0}
def listen(event, **_):
    for name in counts:
        counts[name] += event == f"/jax/compilation_cache/cache_{name}"
jax.monitoring.register_event_listener(listen)
mesh = jax.make_mesh((1,), ("dp",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((64, 512), jnp.bfloat16), P("dp"))
    gamma = jnp.ones(512, jnp.float32)
    jax.block_until_ready((x, gamma))
    before = dict(counts)
    typed = jax.jit(lambda x, gamma: so.rms_norm(x, gamma))(x, gamma)
    mapped = jax.shard_map(so.rms_norm, in_specs=(P("dp"), P()), out_specs=P("dp"))
    manual = jax.jit(mapped)(x, gamma)
    jax.block_until_ready((typed, manual))
print(json.dumps({name: counts[name] - before[name] for name in counts}))
"""


def test_second_process_hits_the_persistent_cache(tmp_path):
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = (json.loads(run(CACHED, **environment)) for _ in range(2))
    assert first["misses"] >= 1
    assert second["misses"] == 0
    assert second["hits"] == first["misses"] + first["hits"]


MOCKED = """
import jax
jax.config.update("jax_mock_gpu_topology", "1x8x1")
import json, jax.numpy as jnp, shardops as so
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from shardops import hlo
assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
place = lambda *spec: NamedSharding(mesh, P(*spec))
rows, wide = place(("dp", "tp"), None), place(None, "tp")
def loss(params, x):
    gamma, w1, w2 = params
    h = so.gemm(so.rms_norm(x, gamma), w1, activation="gelu")
    y = jax.lax.with_sharding_constraint(so.gemm(h, w2), rows)
    return jnp.sum(jnp.square((x + y).astype(jnp.float32)))
shapes = ((4096, 1024), (1024,), (1024, 4096), (4096, 1024))
shardings = (rows, place(), wide, place("tp", None))
x, *params = (
    jax.make_array_from_callback(s, p, lambda index, s=s: jnp.ones(
        [len(range(*i.indices(n))) for i, n in zip(index, s)], jnp.bfloat16))
    for s, p in zip(shapes, shardings)
)
with jax.set_mesh(mesh):
    step = jax.jit(jax.value_and_grad(loss)).lower(tuple(params), x).compile()
for _ in range(3):
    jax.block_until_ready(step(tuple(params), x))
text = step.as_text()
print(json.dumps({
    "launches": text.count("shardops_launch"),
    "gemms": text.count("shardops_gemm"),
    "collectives": {kind: list(pair) for kind, pair in hlo.summary(step).items()},
}))
"""


def test_step_for_eight_gpus_compiles_and_runs_on_a_mocked_topology():
    """Collectives are mocked, so values mean nothing; kernels and the partitioning are real."""
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_shard_autotuning=false"
    facts = json.loads(run(MOCKED, XLA_FLAGS=flags).splitlines()[-1])
    assert facts["launches"] >= 3  # forward, backward, the sum of its partials
    assert facts["gemms"] >= 2
    assert facts["collectives"]


MOCKED_FP8 = """
import jax
jax.config.update("jax_mock_gpu_topology", "1x8x1")
import json, re, jax.numpy as jnp, numpy as np, shardops as so
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from shardops import hlo
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
recipe = so.recipes.Block128Scaling()
def linear(x, w, out):
    a = so.quantize(x, recipe.quantizer("input"))
    b = so.quantize(w, recipe.quantizer("kernel", layout="both"))
    return so.gemm(a, b, out_dtype="bfloat16", out_sharding=out)
def loss(params, x):
    w1, w2 = params
    h = jax.nn.gelu(linear(x, w1, P("dp", "tp")))
    y = linear(h, w2, P(("dp", "tp")))
    return jnp.sum(jnp.square((x + y).astype(jnp.float32)))
shapes = ((8192, 2048), (2048, 8192), (8192, 2048))
specs = (P(("dp", "tp")), P(None, "tp"), P("tp"))
with jax.set_mesh(mesh):
    x, *params = (
        jax.make_array_from_callback(s, NamedSharding(mesh, p), lambda index, s=s: np.ones(
            [len(range(*i.indices(n))) for i, n in zip(index, s)], jnp.bfloat16))
        for s, p in zip(shapes, specs)
    )
    step = jax.jit(jax.value_and_grad(loss)).lower(tuple(params), x).compile()
    jax.block_until_ready(step(tuple(params), x))
text = step.as_text()
gathers = [c for c in hlo.collectives(text) if c.kind == "all-gather"]
print(json.dumps({
    "gathers": [[c.dtype, list(c.shape), c.bytes] for c in gathers],
    "kinds": sorted({c.kind for c in hlo.collectives(text)}),
    "gemms": text.count("shardops_gemm"),
    "f8 gemms": len(re.findall(r"f8e4m3fn.*custom_call_target=.shardops_gemm", text)),
}))
"""


def test_fp8_mlp_for_eight_gpus_gathers_8_bits():
    """Tensor and sequence parallel: activations are gathered as 8-bit data and scales."""
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_shard_autotuning=false"
    facts = json.loads(run(MOCKED_FP8, XLA_FLAGS=flags).splitlines()[-1])
    forward = [g for g in facts["gathers"] if g[1][0] == 4096 and g[0] in ("f8e4m3fn", "u8", "s8")]
    assert forward, facts
    assert facts["gemms"] == 5  # x has no gradient
    wide = [g for g in facts["gathers"] if g[0] in ("bf16", "f16") and np.prod(g[1]) == 4096 * 2048]
    assert len(wide) <= 1, "dz of the second product, which is not quantised"
    assert "reduce-scatter" in facts["kinds"]


def test_demo_trains_on_this_gpu(tmp_path):
    out = run("", "examples/train_lm.py", "--steps", "30", "--out", str(tmp_path / "demo"))
    assert "step" in out or "loss" in out
