"""GEMM: out = activation(lhs · rhs + add + bias), whatever the operands' sharding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardops import array_type, config, routing
from shardops.fusing.marking import markable
from shardops.op import Wanted, compiled, found_again, with_derivative
from shardops.primitives import check
from shardops.primitives.gemm_cotangents import operand_cotangents
from shardops.primitives.gemm_op import ACTIVATIONS, Activation, GemmOp
from shardops.primitives.gemm_scaled import (
    Operand,
    along_contraction,
    arrays_of,
    matched,
    product_with,
    unwrapped,
)
from shardops.primitives.gemm_scaled_local import Scaled
from shardops.primitives.row_sum import row_sum
from shardops.primitives.saved import packed, unpacked
from shardops.primitives.scaled import ScaledArray
from shardops.rules.spec import Spec

Dims = tuple[int, ...]
OutSharding = PartitionSpec | Literal["cheapest"] | None
_LAST_FIRST: tuple[Dims, Dims] = ((-1,), (0,))
_NONE: tuple[Dims, Dims] = ((), ())
_USUAL = (_LAST_FIRST, _NONE, None, None, None, False)  # of the statics, where none is given


def gemm(
    lhs: jax.Array | ScaledArray,
    rhs: jax.Array | ScaledArray,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = _LAST_FIRST,
    batch_dims: tuple[Sequence[int], Sequence[int]] = _NONE,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    add: jax.Array | None = None,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    precise_accumulation: bool = False,
) -> jax.Array:
    """Multiply two arrays over their contracting dims.

        out[*l, *r] = activation(sum_k lhs[*l, *k] rhs[*k, *r] + add[*l, *r] + bias[*r])

    l are the free dims of lhs and r those of rhs, each in order. Accumulates in float32 and adds
    bias and `add` in float32; the activation, in float32, is of that sum or of the sum rounded to
    the result's dtype, as the kernel at hand has it; then the result is rounded.
    Derivatives of any order in reverse mode; no forward mode (`jax.jvp`, `jacfwd`): of `hessian`
    take `jacrev(jacrev(f))`.

    Args:
      lhs, rhs: float32 | bfloat16 | float16; of two dtypes, the operands are promoted as by jnp.
        Or ScaledArrays: multiplied in 8 bits where the GPU can, else dequantised shard by shard;
        what moves are the 8-bit data and their scales. The gradient is straight-through, by the
        values that were multiplied: dlhs = dout · rhsᵀ goes to what was quantised.
      contracting_dims: the contracted dims of lhs and of rhs, paired in order; any number, order
        and place. Negative dims count from the end.
      batch_dims: dims of lhs and of rhs that are batch-like (batch, or sequence in data
        parallelism). The result does not depend on them. A mesh axis that such a dim and another
        one both have stays with it, and a sum over such dims is the data-parallel reduction.
      bias: [*r], float32 | bfloat16 | float16.
      activation: None | "gelu" (tanh approximation) | "silu" | "relu". The gradient uses the saved
        pre-activation, of ReLU the result.
      add: [*l, *r], added to the product (gradient accumulation).
      out_dtype: dtype of the result; None: the operands'. Where it is wider than theirs, the
        cotangent is rounded to the operands' dtype before the products of the gradient, but not to
        float16, in which it could overflow: there these are products of float32, on a GPU of TF32
        (which holds float16 whole) unless jax_default_matmul_precision asks for more.
      out_sharding: PartitionSpec of the result; None: free dims keep the operands' axes;
        "cheapest": wherever that costs the least. With `unreduced=` axes (on a mesh of Explicit
        axes) the sum over these is left to whoever reshards the result.
      precise_accumulation: sum across devices in float32, and no fast FP8 accumulation.
    Returns: [*l, *r].
    Raises: TypeError for dtypes; ValueError for shapes, dims and shardings.
    Sharding: an axis on the same contracting dim of both operands costs one all-reduce of the
      result, or one reduce-scatter where the result is wanted sharded over it; several axes cost
      one collective together. An axis on one operand's contracting dim only gathers that operand,
      or slices the other one and sums the result, whichever costs less. An axis on free dims of
      both is gathered from one operand; on contracting dims that are not paired, from one or both.
      All else is local. bias, `add` and activation come after the sum. Scales of blocks follow
      their operand, which lies in whole blocks on each device, or is gathered.
    Source: https://docs.nvidia.com/cuda/cublas/ (epilogues); GELU: https://arxiv.org/abs/1606.08415
    """
    usual = contracting_dims is _LAST_FIRST and batch_dims is _NONE
    bare = bias is add is activation is out_dtype is out_sharding is None
    if usual and bare and precise_accumulation is False:
        return _eager(None, _USUAL, lhs, rhs)
    dims = (contracting_dims, batch_dims)
    statics = (*dims, activation, out_dtype, out_sharding, precise_accumulation)
    kinds = (None if usual else _kinds(dims), type(out_sharding), type(precise_accumulation))
    return _eager((kinds, statics), statics, lhs, rhs, bias, add)


def _kinds(value: Any) -> Any:
    """The types in nested sequences: True is no dim, though it equals 1."""
    return tuple(map(_kinds, value)) if isinstance(value, tuple | list) else type(value)


def _gemm(
    contracting_dims: Any,
    batch_dims: Any,
    activation: Any,
    out_dtype: Any,
    out_sharding: Any,
    precise_accumulation: Any,
    lhs: Any,
    rhs: Any,
    bias: Any = None,
    add: Any = None,
) -> jax.Array:
    bias, add = check.arrays("gemm", bias=bias, add=add)
    lhs, rhs = check.operands("gemm", unwrapped(lhs), unwrapped(rhs))
    contracting, like = check.gemm_dims("gemm", lhs, rhs, contracting_dims, batch_dims)
    check.one_of("gemm", "activation", activation, (None, "gelu", "silu", "relu"))
    op = GemmOp(
        name="gemm",
        contracting=contracting,
        batch_like=like,
        bias=bias is not None,
        add=add is not None,
        activation=activation,
        out_dtype=check.float_dtype(
            "gemm", "out_dtype", out_dtype, jnp.result_type(lhs.dtype, rhs.dtype)
        ),
        cheapest=out_sharding == "cheapest",
        precise=check.flag("gemm", "precise_accumulation", precise_accumulation),
        kernel=config.runs_as_kernel("gemm"),
    )
    dims = op.dims((lhs.shape, rhs.shape))
    if bias is not None:
        check.shape("gemm", "bias", bias, tuple(rhs.shape[j] for j in dims.rhs_free))
    if add is not None:
        check.shape("gemm", "add", add, dims.out_shape)
    return product(op, lhs, rhs, bias, add, out_sharding)


_eager = found_again(_gemm)


def product(
    op: GemmOp,
    lhs: Operand,
    rhs: Operand,
    bias: jax.Array | None,
    add: jax.Array | None,
    out_sharding: OutSharding,
) -> jax.Array:
    """Run a checked product, its result sharded as `out_sharding` says."""
    out_shape = op.dims((lhs.shape, rhs.shape)).out_shape
    op, lhs, rhs = along_contraction(op, lhs, rhs)
    mesh = array_type.mesh_of(*arrays_of(lhs), *arrays_of(rhs))
    wanted = check.out_sharding(op.name, out_sharding, out_shape, mesh)
    after = {"bias": bias, "activation": op.activation, "add": add}
    later = [name for name, value in after.items() if value is not None]
    unreduced = check.unreduced(op.name, out_sharding, later)
    op = replace(op, unreduced=unreduced, open_dims=check.open_dims(out_sharding))
    scaled = isinstance(lhs, ScaledArray) or isinstance(rhs, ScaledArray)
    run = _compiled_scaled if scaled else _compiled_product
    out = run(op, wanted, *matched(lhs, rhs, bias, add))
    if wanted is None:
        return out
    with jax.named_scope(op.scope):
        return array_type.constrain(out, wanted, op.open_dims, unreduced)


@with_derivative
def _product(
    op: GemmOp,
    wanted: Spec | None,
    lhs: Operand,
    rhs: Operand,
    bias: jax.Array | None,
    add: jax.Array | None,
) -> jax.Array:
    return _run(op, (wanted,), lhs, rhs, bias, add)[0]


def _run(
    op: GemmOp, wanted: Wanted, lhs: Operand, rhs: Operand, *extra: jax.Array | None
) -> tuple[jax.Array, ...]:
    routed = product_with(op, Scaled.of(lhs), Scaled.of(rhs))
    given = (a for a in extra if a is not None)
    return routing.run(routed, (*arrays_of(lhs), *arrays_of(rhs), *given), wanted)


def _save(op: GemmOp, wanted: Spec | None, lhs: Any, rhs: Any, bias: Any, add: Any) -> Any:
    types = tuple(None if a is None else array_type.Type.of(a) for a in (bias, add))
    if op.activation in (None, "relu"):
        # Where ReLU lets through is seen by its result, which whoever comes next saves anyway.
        out = _product(op, wanted, lhs, rhs, bias, add)
        return out, (*packed((lhs, rhs)), None if op.activation is None else out, types)
    if wanted is not None and array_type.mesh_of(*arrays_of(lhs)).auto_axes:
        # Asked of two results of an op, the partitioner moves them one by one.
        out, pre = _apart(op, wanted, lhs, rhs, bias, add)
    else:
        save = replace(op, save=True)
        out, pre = _with_pre_activation(save, wanted, lhs, rhs, bias, add)
    return out, (*packed((lhs, rhs)), pre, types)


def _pull(op: GemmOp, wanted: Spec | None, saved: Any, dout: jax.Array) -> Any:
    """dz = dout · activation';  dlhs = dz · rhsᵀ,  drhs = lhsᵀ · dz,  dbias = sum_rows(dz)."""
    *operands, seen, (bias_type, add_type) = saved
    lhs, rhs = unpacked(operands)
    with jax.named_scope(f"shardops.{op.name}.grad"):
        dz = dout
        if op.activation is not None:
            # Behind a barrier: else XLA keeps in float32 what the forward pass computes of it too.
            seen = jax.lax.optimization_barrier(seen)
            _, pull = jax.vjp(_activation(op), seen.astype(jnp.float32))
            dz = pull(dout.astype(jnp.float32))[0].astype(dout.dtype)
            if bias_type is not None:
                # Else XLA writes dz in float32 for its sum, and rounds it in another pass.
                dz = jax.lax.optimization_barrier(dz)
            dz = _as_result(op, wanted, dz)
        dlhs, drhs = operand_cotangents(op, lhs, rhs, dz)
        dbias = dadd = None
        if bias_type is not None:
            n_rhs = len(op.dims((lhs.shape, rhs.shape)).rhs_free)
            rows = dz.ndim - n_rhs
            dbias = bias_type.apply(
                row_sum(f"{op.name}.grad", dz, rows, bias_type.spec, bias_type.unreduced)
            )
        if add_type is not None:
            dadd = add_type.apply(dz)
    return dlhs, drhs, dbias, dadd


_product.defvjp(_save, _pull)


def product_of(op: GemmOp, wanted: Spec | None, lhs: Operand, rhs: Operand) -> jax.Array:
    """The bare product of checked operands, with its derivative."""
    return _product(op, wanted, lhs, rhs, None, None)


_compiled_product = markable(compiled(_product))
_compiled_scaled = compiled(_product)


def _as_result(op: GemmOp, wanted: Spec | None, array: jax.Array) -> jax.Array:
    """An array like the result, sharded as was asked of that: Auto axes do not know that it is."""
    return array if wanted is None else array_type.constrain(array, wanted, op.open_dims)


def _activation(op: GemmOp) -> Callable[[jax.Array], jax.Array]:
    return ACTIVATIONS[op.activation] if op.activation else lambda z: z


@with_derivative
def _with_pre_activation(
    op: GemmOp, wanted: Spec | None, lhs: Any, rhs: Any, bias: Any, add: Any
) -> Any:
    """(out, pre-activation) from one pass. Its own derivative, for gradients of gradients, is that
    of the product and the activation apart."""
    return _run(op, (wanted, wanted), lhs, rhs, bias, add)


def _apart(op: GemmOp, wanted: Spec | None, lhs: Any, rhs: Any, bias: Any, add: Any) -> Any:
    linear = replace(op, activation=None, save=False)
    pre = _product(linear, wanted, lhs, rhs, bias, add)
    pre = _as_result(op, wanted, pre)
    out = _activation(op)(pre.astype(jnp.float32)).astype(pre.dtype)
    return out, pre


_with_pre_activation.defvjp(
    lambda op, wanted, *operands: (_with_pre_activation(op, wanted, *operands), packed(operands)),
    lambda op, wanted, saved, cotangents: routing.pull(
        partial(_apart, op, wanted), unpacked(saved), cotangents
    ),
)
