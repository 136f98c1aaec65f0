"""The two products of a quantised layer's backward pass: of a cotangent in 8 bits, moved once."""

from dataclasses import dataclass, replace

import jax

from shardops import routing
from shardops.array_type import Type
from shardops.layers.operands import Both
from shardops.primitives import gemm as gemms
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_grad import GemmGradOp
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import arrays_of
from shardops.primitives.gemm_scaled_local import Scaled
from shardops.primitives.scaled import ScaledArray
from shardops.rules.spec import to_partition_spec

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """How many dims x [*rows, *k] and kernel [*k, *groups, n] have; `like`: batch-like rows."""

    name: str
    rows: int
    k: int
    groups: int
    like: Dims


def both_cotangents(
    form: Form,
    plain: GemmOp,
    dz: Both,
    x: ScaledArray,
    kernel: ScaledArray,
    types: tuple[Type, Type],
) -> tuple[jax.Array, jax.Array]:
    """dx [*rows, *k] = dz · kernelᵀ and dkernel [*k, *groups, n] = xᵀ · dz, of these types.

    With one scale both layouts of dz are the same numbers: one op, which moves dz once where both
    products need that. With scales of blocks each product moves its own.

    Args:
      plain: the statics of either product.
      dz: [*groups, *rows, n].
      x: [k, *rows], or [*rows, *k] of several contracted dims.
      kernel: [*groups, *k, n].
    """
    to_x = replace(_to_x(form, plain), out_dtype=types[0].dtype.name)
    plain = replace(plain, out_dtype=types[1].dtype.name)
    to_kernel = _to_kernel(form, plain, form.groups + 1)
    if dz.rows.block is not None:
        return (
            gemms.product(to_x, dz.rows, kernel, None, None, _wanted(types[0])),
            gemms.product(to_kernel, x, dz.columns, None, None, _wanted(types[1])),
        )
    g, k, rows = form.groups, form.k, form.rows
    of_x, of_kernel = (type.unreduced for type in types)
    forward = ((0,) if k == 1 else tuple(range(rows, rows + k)), tuple(range(g, g + k)))
    op = GemmGradOp(
        plain.name.removesuffix(".grad"),
        replace(to_x, unreduced=of_x),
        replace(_to_kernel(form, plain, g), unreduced=of_kernel),
        replace(plain, contracting=forward),
        plain.kernel,
        Scaled.of(x),
        Scaled.of(kernel),
        Scaled.of(dz.rows),
        replace(to_kernel, unreduced=of_kernel),
    )
    data, scale = arrays_of(dz.rows)
    transposed, _ = arrays_of(dz.columns)
    arrays = (data, transposed, scale, *arrays_of(x), *arrays_of(kernel))
    dx, dkernel = routing.run(op, arrays, tuple(type.spec for type in types))
    return dx, dkernel


def _to_x(form: Form, plain: GemmOp) -> GemmOp:
    """dz [*groups, *rows, n] · kernel [*groups, *k, n]."""
    g = form.groups
    groups, n = tuple(range(g)), (g + form.rows, g + form.k)
    return replace(
        plain,
        contracting=((*groups, n[0]), (*groups, n[1])),
        batch_like=(tuple(g + d for d in form.like), ()),
    )


def _to_kernel(form: Form, plain: GemmOp, at: int) -> GemmOp:
    """x · dz, whose rows' dims begin at `at`."""
    starts = (1 if form.k == 1 else 0, at)
    rows, like = (
        tuple(tuple(start + d for d in dims) for start in starts)
        for dims in (range(form.rows), form.like)
    )
    return replace(plain, contracting=rows, batch_like=like)


def _wanted(of: Type) -> OutSharding:
    return None if of.spec is None else to_partition_spec(of.spec, of.unreduced)
