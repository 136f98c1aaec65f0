"""One step that the processes run: a norm, a column- and a row-parallel product, weights FSDP.

loss = sum(sin(gelu(layer_norm(x, gamma) · up) · down)),  and its gradients of all
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import cases, references
from tests.closeness import assert_shards_close

SHAPES = {"x": (8, 4, 16), "gamma": (16,), "up": (16, 32), "down": (32, 16)}
LAYOUTS = {"x": P("dp"), "gamma": P(), "up": P("dp", "tp"), "down": P("tp", "dp")}

_E, _A = AxisType.Explicit, AxisType.Auto
TYPES = {  # of dp and tp
    "none": None,
    "auto": (_A, _A),
    "explicit": (_E, _E),
    "mixed": (_E, _A),
    "shard_map": (_A, _A),
    "partly manual": (_A, _A),
}


def mesh(route: str, dp: int, tp: int, *, tp_major: bool = False) -> Mesh | None:
    """tp_major: neighbours are on the same part of dp, so that a sum over tp crosses processes."""
    types = TYPES[route]
    if types is None:
        return None
    sizes = {"dp": dp, "tp": tp}
    names = ("tp", "dp") if tp_major else ("dp", "tp")
    of = dict(zip(("dp", "tp"), types, strict=True))
    return jax.make_mesh(
        tuple(sizes[n] for n in names), names, axis_types=tuple(of[n] for n in names)
    )


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: cases.random(rng, shape, scale=0.5) for n, shape in SHAPES.items()}


def placed(on: Mesh | None) -> dict[str, jax.Array]:
    """On the mesh, of which a process may hold a part."""
    arrays = operands()
    if on is None:
        return {n: jnp.asarray(a) for n, a in arrays.items()}
    return {
        n: jax.make_array_from_callback(a.shape, NamedSharding(on, LAYOUTS[n]), a.__getitem__)
        for n, a in arrays.items()
    }


def step(route: str) -> Callable[[dict[str, jax.Array]], Any]:
    """A jitted function: loss and gradients."""
    loss = {"shard_map": _mapped, "partly manual": _partly_mapped}.get(route, _loss)
    return jax.jit(jax.value_and_grad(loss))


def check(got: Any) -> None:
    """On each device that this process has, against float64."""
    loss, gradients = got
    wanted_loss, wanted = _wanted()
    np.testing.assert_allclose(float(loss), wanted_loss, rtol=1e-5)
    for name, gradient in gradients.items():
        assert_shards_close(gradient, wanted[name], reduced=32 * 32, roundings=4, what=name)


def _loss(a: dict[str, jax.Array]) -> jax.Array:
    hidden = so.gemm(so.layer_norm(a["x"], a["gamma"]), a["up"], activation="gelu")
    return jnp.sum(jnp.sin(so.gemm(hidden, a["down"])))


def _mapped(a: dict[str, jax.Array]) -> jax.Array:
    """By hand: weights gathered over dp, the second product summed over tp."""

    def body(a: dict[str, jax.Array]) -> jax.Array:
        up = jax.lax.all_gather(a["up"], "dp", axis=0, tiled=True)
        down = jax.lax.all_gather(a["down"], "dp", axis=1, tiled=True)
        hidden = so.gemm(so.layer_norm(a["x"], a["gamma"]), up, activation="gelu")
        out = jax.lax.psum(so.gemm(hidden, down), "tp")
        return jax.lax.psum(jnp.sum(jnp.sin(out)), "dp")

    return jax.shard_map(body, in_specs=(LAYOUTS,), out_specs=P())(a)


def _partly_mapped(a: dict[str, jax.Array]) -> jax.Array:
    """dp is mapped, tp is left to the ops."""

    def body(a: dict[str, jax.Array]) -> jax.Array:
        up = jax.lax.all_gather(a["up"], "dp", axis=0, tiled=True)
        down = jax.lax.all_gather(a["down"], "dp", axis=1, tiled=True)
        return jax.lax.psum(_loss({**a, "up": up, "down": down}), "dp")

    specs = {"x": P("dp"), "gamma": P(), "up": P("dp"), "down": P(None, "dp")}
    return jax.shard_map(body, in_specs=(specs,), out_specs=P(), axis_names={"dp"})(a)


def _wanted() -> tuple[float, dict[str, np.ndarray]]:
    a = operands()
    y = references.layer_norm_reference(a["x"], a["gamma"]).y
    hidden = references.gemm_reference(y, a["up"], activation="gelu")
    out = references.gemm_reference(hidden, a["down"])
    second = references.gemm_vjp_reference(np.cos(out), hidden, a["down"])
    first = references.gemm_vjp_reference(second.lhs, y, a["up"], activation="gelu")
    norm = references.layer_norm_vjp_reference(first.lhs, a["x"], a["gamma"])
    gradients = {"x": norm.x, "gamma": norm.gamma, "up": first.rhs, "down": second.rhs}
    return float(np.sin(out).sum()), gradients
