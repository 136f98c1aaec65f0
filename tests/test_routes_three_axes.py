"""Two and more Auto axes inside a manual region, where offered shardings do not name their axes.

There XLA counts the devices of the free axes in an order that changes from program to program; a
sum by the wrong name is a wrong number without an error.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests.closeness import assert_shards_close

AXES = ("a", "b", "c")
X, W, V = (16, 8, 16), (16, 8), (8, 16)


def block(x, w, v, gamma):
    y = so.gemm(so.layer_norm(x, gamma, gamma), w, activation="silu")
    y = so.gemm(y, v, batch_dims=((0,), ()))
    return so.rms_norm(y, gamma, add=x)


def plain_block(x, w, v, gamma):
    centred = x - x.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    y = jax.nn.silu((y * gamma + gamma) @ w) @ v + x
    return y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6) * gamma


def random_spec(ndim: int, axes: list[str]) -> P:
    entries: list[list[str]] = [[] for _ in range(ndim)]
    for axis in random.sample(axes, len(axes)):
        if random.random() < 0.7:
            entries[random.randrange(ndim)].append(axis)
    return P(*(tuple(e) if e else None for e in entries))


@pytest.mark.parametrize("kind", ["check_vma", "no_vma", "explicit"])
@pytest.mark.parametrize("seed", range(4))
def test_block_inside_a_manual_axis(kind, seed):
    """Values and gradients of a norm-gemm-gemm-norm block, every operand sharded at random."""
    random.seed(seed)
    rng = np.random.default_rng(seed)
    manual = random.choice(AXES)
    free = [a for a in AXES if a != manual]
    explicit = kind == "explicit"
    types = [AxisType.Explicit if explicit and a == manual else AxisType.Auto for a in AXES]
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=tuple(types))
    arrays = [rng.standard_normal(s).astype(np.float32) for s in (X, W, V, (16,))]
    cotangent = rng.standard_normal(X).astype(np.float32)

    def pulled(function):
        def step(cotangent, *arrays):
            out, pull = jax.vjp(function, *arrays)
            return out, *pull(cotangent)

        return jax.jit(step)

    want = pulled(plain_block)(cotangent, *arrays)
    with jax.set_mesh(mesh):
        x_spec, *others = [random_spec(n, free) for n in (3, 2, 2, 1)]
        leading = x_spec[0] or ()
        specs = [P((manual, *leading), *x_spec[1:]), *others]
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        mapped = jax.shard_map(
            block,
            in_specs=(P(manual), P(), P(), P()),
            out_specs=P(manual),
            axis_names={manual},
            check_vma=kind == "check_vma",
        )
        run = pulled(block if explicit else mapped)
        got = run(jax.device_put(cotangent, NamedSharding(mesh, P(manual))), *placed)
    for one, other in zip(got, want, strict=True):
        assert_shards_close(one, np.asarray(other), reduced=128, roundings=8)


def test_pipeline_stage_of_a_tensor_parallel_mlp_sums_over_the_right_axis():
    """shard_map over pp; dp and tp, of equal size, are Auto inside. The probes move nothing."""
    mesh = jax.make_mesh((2, 2, 2), ("pp", "dp", "tp"), axis_types=(AxisType.Auto,) * 3)
    rng = np.random.default_rng(0)
    x, w, v = (
        rng.standard_normal(s).astype(np.float32) for s in ((2, 8, 16), (2, 16, 8), (2, 8, 16))
    )

    def stage(x, w, v):
        return so.gemm(so.gemm(x[0], w[0]), v[0])[None]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(stage, in_specs=P("pp"), out_specs=P("pp"), axis_names={"pp"})
        specs = (P("pp", "dp"), P("pp", None, "tp"), P("pp", "tp"))
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w, v), specs, strict=True)
        ]
        forward = jax.jit(mapped, out_shardings=NamedSharding(mesh, P("pp", "dp")))
        got = forward(*placed)
        moved = hlo.summary(forward.lower(*placed).compile())
        gradients = jax.jit(jax.grad(lambda *a: (mapped(*a) ** 2).sum(), (0, 1, 2)))(*placed)
    assert_shards_close(got, x @ w @ v, reduced=16, roundings=4)
    want = jax.grad(lambda x, w, v: ((x @ w @ v) ** 2).sum(), (0, 1, 2))(x, w, v)
    for one, other in zip(gradients, want, strict=True):
        assert_shards_close(one, np.asarray(other), reduced=16, roundings=8)
    assert moved == {"all-reduce": (1, 4 * 16 * 4)}


def test_vmap_over_an_explicit_axis_beside_an_auto_one():
    """The probes are sharded over Auto axes only; the vmapped axis is counted all the same."""
    explicit, auto = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(auto, explicit, explicit))
    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(s).astype(np.float32) for s in ((4, 16, 8), (8, 8), (8, 8)))
    with jax.set_mesh(mesh):
        xs, vs = jax.device_put(x, P("c", "b")), jax.device_put(v, P("b"))
        batched = jax.jit(jax.vmap(so.gemm, (0, None)))(xs, w)
        # The second product sees nothing that is vmapped: it is traced inside, and stays as it is.
        mixed = jax.jit(jax.vmap(lambda x, v: x.sum() + so.gemm(v, v).sum(), (0, None)))(xs, vs)
    np.testing.assert_allclose(batched, x @ w, atol=1e-5)
    np.testing.assert_allclose(mixed, x.sum((1, 2)) + (v @ v).sum(), rtol=1e-4)
