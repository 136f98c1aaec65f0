"""The cotangents of a product's operands, quantised or not."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardops import array_type, config, routing
from shardops.op import Wanted, with_derivative
from shardops.primitives.gemm_grad import GemmGradOp, orders
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import Operand, arrays_of, cotangent_of, matched, target_of
from shardops.primitives.gemm_scaled_local import Scaled
from shardops.primitives.saved import packed, unpacked
from shardops.primitives.scaled import ScaledArray
from shardops.rules.gemm_dims import Dims
from shardops.rules.spec import Axes, Spec


def gradient_of(op: GemmOp, lhs: Operand, rhs: Operand) -> GemmGradOp:
    """The op that pulls a cotangent dz [batch, lhs free, rhs free] back to both operands.

    to_lhs: [batch, lhs free, contracted in the order of rhs's dims];
    to_rhs: [batch, contracted in the order of lhs's dims, rhs free].
    """
    d = op.dims((lhs.shape, rhs.shape))
    batch, n_lhs = len(d.lhs_batch), len(d.lhs_free)
    z_batch = tuple(range(batch))
    z_lhs = tuple(range(batch, batch + n_lhs))
    z_rhs = tuple(range(batch + n_lhs, batch + n_lhs + len(d.rhs_free)))
    product = replace(op.bare, unreduced=())
    plain = replace(product, cheapest=False, kernel=config.runs_as_kernel(f"{op.name}.grad"))
    to_lhs = replace(
        plain,
        contracting=(z_rhs, d.rhs_free),
        batch=(z_batch, d.rhs_batch),
        batch_like=(d.out_batch_like, d.rhs_batch_like),
        out_dtype=lhs.dtype.name,
        unreduced=_deferred(lhs),
    )
    to_rhs = replace(
        plain,
        contracting=(d.lhs_free, z_lhs),
        batch=(d.lhs_batch, z_batch),
        batch_like=(d.lhs_batch_like, d.out_batch_like),
        out_dtype=rhs.dtype.name,
        unreduced=_deferred(rhs),
    )
    scaled = Scaled.of(lhs), Scaled.of(rhs)
    return GemmGradOp(op.name, to_lhs, to_rhs, product, plain.kernel, *scaled)


def operand_cotangents(op: GemmOp, lhs: Operand, rhs: Operand, dz: jax.Array) -> Any:
    """The cotangents of both operands, laid out as they are; None for a constant."""
    gradient = gradient_of(op, lhs, rhs)
    to = target_of(lhs), target_of(rhs)
    both = orders(op.dims((lhs.shape, rhs.shape)))
    wanted = tuple(map(_wanted, to, both))
    dz, lhs, rhs = matched(dz.astype(_cotangent_dtype(dz, lhs, rhs)), lhs, rhs)
    if None not in to:
        found = _pull(gradient, wanted, dz, lhs, rhs)
    else:
        found = _one_by_one(gradient, wanted, dz, lhs, rhs, [a is not None for a in to])
    every = zip((lhs, rhs), found, both, to, strict=True)
    return tuple(cotangent_of(a, _reordered(d, order, like)) for a, d, order, like in every)


def _cotangent_dtype(dz: jax.Array, lhs: Operand, rhs: Operand) -> Any:
    """What dz is rounded to: the dtype of an operand that is not quantised, which it meets.

    But for float16, whose range is the smaller one: what is wider meets it as it is.
    """
    plain = [a.dtype for a in (lhs, rhs) if not isinstance(a, ScaledArray)]
    common = jnp.result_type(lhs.dtype, rhs.dtype)
    met = plain[0] if plain else min(dz.dtype, common, key=lambda dtype: dtype.itemsize)
    return dz.dtype if met == jnp.float16 else met


def _one_by_one(
    op: GemmGradOp, wanted: Wanted, dz: Any, lhs: Any, rhs: Any, asked: Sequence[bool] = (True,) * 2
) -> tuple[Any, Any]:
    from shardops.primitives.gemm import product_of  # which imports this file

    return (
        product_of(op.to_lhs, wanted[0], dz, rhs) if asked[0] else None,
        product_of(op.to_rhs, wanted[1], lhs, dz) if asked[1] else None,
    )


@with_derivative
def _pull(op: GemmGradOp, wanted: Wanted, dz: Any, lhs: Any, rhs: Any) -> Any:
    """(dlhs, drhs). Its own derivative is that of the two products apart."""
    return routing.run(op, (dz, *arrays_of(lhs), *arrays_of(rhs)), wanted)


def _save(op: GemmGradOp, wanted: Wanted, dz: Any, lhs: Any, rhs: Any) -> Any:
    return _pull(op, wanted, dz, lhs, rhs), packed((dz, lhs, rhs))


def _pull_back(op: GemmGradOp, wanted: Wanted, saved: Any, cotangents: Any) -> Any:
    return routing.pull(partial(_one_by_one, op, wanted), unpacked(saved), cotangents)


_pull.defvjp(_save, _pull_back)


def _wanted(like: jax.Array | None, order: Dims) -> Spec | None:
    """The sharding in the type of `like`, its dims in another order."""
    spec = None if like is None else array_type.explicit_spec(like)
    return None if spec is None else tuple(spec[dim] for dim in order)


def _reordered(out: jax.Array | None, order: Dims, like: jax.Array | None) -> jax.Array | None:
    """An array whose p-th dim is dim `order[p]` of `like`, with the dims and the type of `like`."""
    if out is None or like is None:
        return None
    inverse = sorted(range(len(order)), key=lambda p: order[p])
    return array_type.Type.of(like).apply(jnp.transpose(out, inverse))


def _deferred(operand: Operand) -> Axes:
    to = target_of(operand)
    return () if to is None else array_type.deferred_axes(to)
