"""A product of quantised operands with its derivative, whose products are of 8-bit data as well."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardops import array_type, config, routing
from shardops.errors import wrong
from shardops.layers.backward import Form, both_cotangents
from shardops.layers.operands import Both, in_both_layouts
from shardops.layers.product import activated
from shardops.maxima import reported
from shardops.op import compiled, with_derivative
from shardops.primitives import gemm as gemms
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.row_sum import row_sum
from shardops.primitives.scaled import ScaledArray
from shardops.primitives.scaling import ScalingMode
from shardops.quantizer import DenseQuantizers, Quantizer


class Operands(NamedTuple):
    """What the product reads. `x` and `kernel` have the cotangents, the 8-bit parts have none."""

    x_parts: Any  # Both
    kernel_parts: Any  # Both, groups in front
    gradient: Any  # Quantizer
    observed: Any  # of x, kernel and dz
    x: Any
    kernel: Any
    bias: jax.Array | None


def quantized_product(
    form: Form,
    op: GemmOp,
    parts: Both,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    quantizers: DenseQuantizers,
    out_sharding: OutSharding,
) -> jax.Array:
    """activation(x · kernel + bias) [*rows, *groups, n] of the parts of x."""
    grouped = _groups_first(kernel, form.k, form.groups)
    kernel_parts = in_both_layouts(grouped, quantizers.kernel, form.groups)
    q = quantizers
    observed = (q.input.observed, q.kernel.observed, q.gradient.observed)
    gradient = replace(quantizers.gradient, amax_history=None, observed=None)
    x, kernel, *rest = routing.match_varying(x, kernel, *([] if bias is None else [bias]))
    operands = Operands(
        parts, kernel_parts, gradient, observed, x, kernel, rest[0] if rest else None
    )
    linear = replace(op, activation=None)
    pre = _compiled_product((form, linear), out_sharding, operands)
    return activated(op, pre, out_sharding)


def _groups_first(array: jax.Array, before: int, groups: int) -> jax.Array:
    """[*before, *groups, h] -> [*groups, *before, h]."""
    if not groups:
        return array
    return jnp.moveaxis(array, range(before, before + groups), range(groups))


Static = tuple[Form, GemmOp]


@with_derivative
def _product(static: Static, out_sharding: OutSharding, operands: Operands) -> Any:
    """x · kernel + bias."""
    form, op = static
    g, k, rows = form.groups, form.k, form.rows
    op = replace(
        op,
        contracting=(tuple(range(rows, rows + k)), tuple(range(g + 1, g + 1 + k))),
        batch_like=(form.like, ()),
    )
    lhs, rhs = operands.x_parts.rows, operands.kernel_parts.columns
    return gemms.product(op, lhs, rhs, operands.bias, None, out_sharding)


def _save(static: Static, out_sharding: OutSharding, operands: Operands) -> Any:
    form = static[0]
    _check_watched(form.name, operands)
    x_parts, kernel_parts = operands.x_parts, operands.kernel_parts
    # With several contracted dims no layout of x has its rows along memory.
    x = x_parts.columns if form.k == 1 else x_parts.rows
    saved = (
        _once_of(form.name, x, operands.x),
        _once_of(form.name, kernel_parts.rows, operands.kernel),
        operands.gradient,
        (x_parts.amax, kernel_parts.amax),
        operands.observed,
        tuple(
            None if a is None else array_type.Type.of(a)
            for a in (operands.x, operands.kernel, operands.bias)
        ),
    )
    return _product(static, out_sharding, operands), saved


def _once_of(name: str, part: ScaledArray, of: jax.Array) -> ScaledArray:
    return replace(part, data=_differentiated_once(name, None, part.data, of))


@with_derivative
def _differentiated_once(name: str, _: None, array: Any, of: Any) -> jax.Array:
    """`array`, which was made of `of`, in a derivative that has none: rounding would give 0."""
    del name, of
    return array


def _refuse(name: str, _: None, *given: Any) -> Any:
    del given
    raise NotImplementedError(
        f"{name}: quantizers are given; expected None where a gradient is differentiated again. "
        "Take the second derivative without quantisation."
    )


_differentiated_once.defvjp(_refuse, _refuse)


def _check_watched(name: str, operands: Operands) -> None:
    delayed = ScalingMode.TENSOR_DELAYED
    modes = (operands.x_parts.rows.mode, operands.kernel_parts.rows.mode, operands.gradient.mode)
    for role, mode, seen in zip(
        ("input", "kernel", "gradient"), modes, operands.observed, strict=True
    ):
        if mode is delayed and seen is None:
            got = "delayed state that nothing watches, where a gradient is taken"
            fix = "Begin the differentiated function with `so.recipes.watch(quantizers)`."
            raise ValueError(wrong(name, f"quantizers.{role}", got, "watched state", fix))


def _pull(static: Static, out_sharding: OutSharding, saved: Any, dz: jax.Array) -> Any:
    """dx = dz · kernelᵀ,  dkernel = xᵀ · dz,  dbias = sum_rows(dz),  dz quantised once."""
    del out_sharding
    form, op = static
    x, kernel, gradient, amaxes, observed, (x_type, kernel_type, bias_type) = saved
    g, rows = form.groups, form.rows
    plain = replace(op.bare, cheapest=False, name=f"{op.name}.grad")
    plain = replace(plain, kernel=config.runs_as_kernel(plain.name))
    with jax.named_scope(plain.scope):
        dz_parts = in_both_layouts(_groups_first(dz, rows, g), gradient, g)
        dx, dkernel = both_cotangents(form, plain, dz_parts, x, kernel, (x_type, kernel_type))
        dbias = None
        if bias_type is not None:
            dbias = row_sum(plain.name, dz, rows, bias_type.spec, bias_type.unreduced)
            dbias = bias_type.apply(dbias)
        seen = tuple(
            None if like is None or amax is None else reported(amax, like)
            for amax, like in zip((*amaxes, dz_parts.amax), observed, strict=True)
        )
    # On what is returned: JAX drops what no later derivative reads.
    once = (dz, x.data, kernel.data)
    dx, dkernel = (_differentiated_once(form.name, None, d, once) for d in (dx, dkernel))
    return (Operands(None, None, None, seen, x_type.apply(dx), kernel_type.apply(dkernel), dbias),)


_product.defvjp(_save, _pull)
_compiled_product = compiled(_product)


def check_quantizers(name: str, argument: str, value: Any) -> None:
    """Refuse what no recipe made for a dense layer."""
    if not isinstance(value, DenseQuantizers):
        want, fix = "a DenseQuantizers", "Take those of a recipe: recipe.dense_quantizers()."
        raise TypeError(wrong(name, argument, f"a {type(value).__name__}", want, fix))
    for role in ("input", "kernel", "gradient"):
        one = getattr(value, role)
        if not isinstance(one, Quantizer):
            fix = "Take those of a recipe: recipe.dense_quantizers()."
            got = f"a {type(one).__name__}"
            raise TypeError(wrong(name, f"{argument}.{role}", got, "a Quantizer", fix))
        if (one.mode is ScalingMode.TENSOR_DELAYED) == (one.scale_inv is None):
            fix = "Take those of a recipe: recipe.dense_quantizers()."
            got = f"of mode {one.mode} {'without' if one.scale_inv is None else 'with'} state"
            raise ValueError(
                wrong(name, f"{argument}.{role}", got, "state of delayed scaling", fix)
            )
        if one.scale_inv is not None and jnp.shape(one.scale_inv) != ():
            got = f"delayed state of shape {jnp.shape(one.scale_inv)}"
            fix = "State that is stacked over layers goes through jax.lax.scan with the layers."
            raise ValueError(wrong(name, f"{argument}.{role}", got, "state of one layer, ()", fix))
