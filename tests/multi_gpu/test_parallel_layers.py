"""Parallel layers over the GPUs of one host: values and gradients, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import references
from tests.closeness import assert_shards_close

B, S, K, N = 8, 64, 256, 512


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    """All GPUs along tp, but for a dp of 2 where there are four or more."""
    count = len(jax.devices())
    shape = (2, count // 2) if count >= 4 and count % 2 == 0 else (1, count)
    kind = AxisType.Explicit if request.param == "explicit" else AxisType.Auto
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("dp", "tp"), axis_types=(kind, kind), devices=devices)
    with jax.set_mesh(mesh):
        yield mesh


LAYOUTS = {
    "column": (P("dp"), P(None, "tp"), P("dp", None, "tp")),
    "row": (P("dp", None, "tp"), P("tp"), P("dp")),
    "row, scattered": (P("dp", None, "tp"), P("tp"), P("dp", "tp")),
    "sequence, column": (P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")),
    "fsdp": (P("tp"), P("tp"), P("tp")),
}


def put(mesh, array, spec, dtype):
    return jax.device_put(jnp.asarray(array, dtype), NamedSharding(mesh, spec))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gemm_on_real_collectives(mesh, rng, layout, dtype):
    x_spec, w_spec, y_spec = LAYOUTS[layout]
    x = put(mesh, rng.standard_normal((B, S, K)), x_spec, dtype)
    w = put(mesh, rng.standard_normal((K, N)) * 0.1, w_spec, dtype)
    dy = put(mesh, rng.standard_normal((B, S, N)), y_spec, dtype)

    @jax.jit
    def step(x, w, dy):
        y, pull = jax.vjp(lambda x, w: so.gemm(x, w, out_sharding=y_spec), x, w)
        return y, *pull(dy)

    y, dx, dw = step(x, w, dy)
    x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    assert_shards_close(y, x64 @ w64, reduced=K, roundings=2)
    assert_shards_close(dx, dy64 @ w64.T, reduced=N, roundings=2)
    assert_shards_close(dw, np.einsum("bsk,bsn->kn", x64, dy64), reduced=B * S, roundings=2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", [P("dp", "tp"), P(("dp", "tp"))], ids=["sequence", "batch"])
def test_rms_norm_on_real_collectives(mesh, rng, spec, dtype):
    x = put(mesh, rng.standard_normal((B, S, K)), spec, dtype)
    dy = put(mesh, rng.standard_normal((B, S, K)), spec, dtype)
    gamma = put(mesh, rng.standard_normal(K), P(), jnp.float32)

    @jax.jit
    def step(x, gamma, dy):
        y, pull = jax.vjp(so.rms_norm, x, gamma)
        return y, *pull(dy)

    y, dx, dgamma = step(x, gamma, dy)
    x64, dy64, gamma64 = (np.asarray(a, np.float64) for a in (x, dy, gamma))
    want = references.rms_norm_vjp_reference(dy64, x64, gamma64)
    assert_shards_close(y, references.rms_norm_reference(x64, gamma64).y, reduced=K)
    assert_shards_close(dx, want.x, reduced=K, roundings=2)
    assert_shards_close(dgamma, want.gamma, reduced=B * S)


def test_layer_norm_of_a_sharded_row_on_real_collectives(mesh, rng):
    x = put(mesh, rng.standard_normal((B, S, K)) + 3, P("dp", None, "tp"), jnp.float32)
    gamma = put(mesh, rng.standard_normal(K), P("tp"), jnp.float32)
    y = jax.jit(lambda x, g: so.layer_norm(x, g, g))(x, gamma)
    x64, gamma64 = (np.asarray(a, np.float64) for a in (x, gamma))
    want = references.layer_norm_reference(x64, gamma64, gamma64).y
    assert_shards_close(y, want, reduced=K)
