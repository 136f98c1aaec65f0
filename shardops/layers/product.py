"""Products whose pre-activation is a value of its own, for `jax.checkpoint` policies to save.

Policies see what comes out of a function that has its own derivative, not what it saves.
"""

from dataclasses import replace
from typing import Any

import jax

from shardops import array_type, routing
from shardops.checkpoint_policies import GEMM
from shardops.layers.activations import activate, activation_of
from shardops.layers.names import named
from shardops.op import compiled, with_derivative
from shardops.primitives import check
from shardops.primitives import gemm as gemms
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import ScaledGemmOp, along_contraction, arrays_of
from shardops.primitives.gemm_scaled_local import Scaled


def product(
    op: GemmOp, lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None, out_sharding: OutSharding
) -> jax.Array:
    """activation(lhs · rhs + bias), with its derivative."""
    linear = replace(op, activation=None)
    if op.activation is None or apart(out_sharding, lhs):
        pre = gemms.product(linear, lhs, rhs, bias, None, out_sharding)
        return activate(op.activation, named(pre, GEMM))
    out, pre = _compiled_activated(op, out_sharding, lhs, rhs, bias)
    return activation_of(op.activation, None, named(pre, GEMM), out)


def apart(out_sharding: OutSharding, *arrays: jax.Array) -> bool:
    """Whether an activation is to be computed apart from its product.

    Asked of two results of an op, the partitioner of Auto axes moves them one by one.
    """
    return out_sharding is not None and bool(array_type.mesh_of(*arrays).auto_axes)


def as_asked(op: str, value: jax.Array, out_sharding: OutSharding) -> jax.Array:
    """A value with the sharding that was asked for, and its cotangent with it: Auto axes know of
    neither."""
    mesh = array_type.mesh_of(value)
    wanted = check.out_sharding(op, out_sharding, value.shape, mesh)
    if wanted is None or not mesh.auto_axes:
        return value
    return array_type.constrain(value, wanted, check.open_dims(out_sharding))


def forward(
    op: GemmOp, lhs: Any, rhs: Any, bias: jax.Array | None, out_sharding: OutSharding
) -> tuple[jax.Array, jax.Array | None]:
    """The result and, where there is an activation, the pre-activation. No derivative.

    lhs, rhs: arrays or ScaledArrays.
    """
    out_shape = op.dims((lhs.shape, rhs.shape)).out_shape
    op, lhs, rhs = along_contraction(op, lhs, rhs)
    operands = [*arrays_of(lhs), *arrays_of(rhs)]
    mesh = array_type.mesh_of(*operands)
    wanted = check.out_sharding(op.name, out_sharding, out_shape, mesh)
    after = [name for name in ("bias", "activation") if getattr(op, name)]
    unreduced = check.unreduced(op.name, out_sharding, after)
    op = replace(
        op,
        unreduced=unreduced,
        open_dims=check.open_dims(out_sharding),
        save=op.activation is not None,
    )
    scaled = ScaledGemmOp(op, Scaled.of(lhs), Scaled.of(rhs))
    matched = routing.match_varying(*operands, *([] if bias is None else [bias]))
    run = scaled if scaled.lhs or scaled.rhs else op
    results = routing.run(run, matched, (wanted,) * (1 + op.save))
    if wanted is not None:
        with jax.named_scope(op.scope):
            results = [array_type.constrain(r, wanted, op.open_dims, unreduced) for r in results]
    return (results[0], results[1]) if op.save else (results[0], None)


@with_derivative
def _activated(op: GemmOp, out_sharding: OutSharding, lhs: Any, rhs: Any, bias: Any) -> Any:
    """(out, pre-activation) from one pass. Only the latter has a cotangent: see `activation_of`."""
    return forward(op, lhs, rhs, bias, out_sharding)


def _save(op: GemmOp, out_sharding: OutSharding, lhs: Any, rhs: Any, bias: Any) -> Any:
    return _activated(op, out_sharding, lhs, rhs, bias), (lhs, rhs, bias)


def _pull(op: GemmOp, out_sharding: OutSharding, saved: Any, cotangents: Any) -> Any:
    linear = replace(op, activation=None)

    def pre_activation(lhs: Any, rhs: Any, bias: Any) -> jax.Array:
        return gemms.product(linear, lhs, rhs, bias, None, out_sharding)

    return jax.vjp(pre_activation, *saved)[1](cotangents[1])


_activated.defvjp(_save, compiled(_pull))
_compiled_activated = compiled(_activated)
