"""A dense layer: activation(x · kernel + bias)."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardops import array_type, checkpoint_policies, config
from shardops.layers.activations import check_activation
from shardops.layers.backward import Form
from shardops.layers.canonical import canonical
from shardops.layers.gathering import check_input_sharding, gathered
from shardops.layers.operands import Input
from shardops.layers.product import product
from shardops.layers.quantized import check_quantizers, quantized_product
from shardops.primitives import check
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_op import Activation, GemmOp
from shardops.quantizer import DenseQuantizers
from shardops.rules.spec import to_spec

Dims = tuple[Sequence[int], Sequence[int]]


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    contracting_dims: Dims = ((-1,), (0,)),
    batch_dims: Dims = ((), ()),
    activation: Activation | None = None,
    quantizers: DenseQuantizers | None = None,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    input_sharding: PartitionSpec | None = None,
    precise_accumulation: bool = False,
) -> jax.Array:
    """Multiply by a kernel, add a bias and activate.

        y[*r, *n] = activation(sum_k x[*r, *k] kernel[*k, *n] + bias[*n])

    With `quantizers` x and kernel are quantised, each once in the layouts of both passes, and so is
    the cotangent dz of the pre-activation; all three products are of 8-bit data:

        dx = dz · kernelᵀ,  dkernel = xᵀ · dz,  dbias = sum_r(dz)

    Between the passes are kept: x and kernel, or of each the 8-bit layout that the backward pass
    reads; and the pre-activation where there is an activation. Derivatives of any order in reverse
    mode, with `quantizers` of the first.

    Args:
      x: float32 | bfloat16 | float16, any shape: batch or sequence first.
      kernel: any of these dtypes; where both are not quantised they are promoted as by jnp.
      bias: [*n], any of these dtypes.
      contracting_dims, batch_dims: as of `shardops.gemm`.
      activation: None | "gelu" (tanh approximation) | "silu" | "relu".
      quantizers: of a recipe, `recipe.dense_quantizers()`; None: no quantisation. State of delayed
        scaling is to be watched (`so.recipes.watch`) where a gradient is taken.
      out_dtype: dtype of the result; None: that of x and kernel promoted.
      out_sharding: PartitionSpec of the result, "cheapest" or None, as of `shardops.gemm`.
      input_sharding: where x lies while it is multiplied, gathered once for both passes: of each
        dim of x leading axes or none. Kept from one pass to the other; under `jax.checkpoint` by
        the policy `save_gathered`. Explicit axes alone. None: each product gathers what it needs.
      precise_accumulation: as of `shardops.gemm`, in both passes.
    Returns: y [*r, *n].
    Raises: TypeError for dtypes and quantisers; ValueError for shapes, dims, activations, shardings
      and for state that is missing or not watched.
    Sharding: as of three products (`shardops.gemm`); what moves of quantised operands are 8-bit
      data and scales. Quantisers with one scale a tensor take one all-reduce of one or two numbers
      for each operand that is sharded; dz, with one scale, is moved once for both of its products,
      with scales of blocks once for each.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433
    """
    (x,) = check.arrays("dense", x=x)
    out, _ = linear(
        "dense",
        Input(x),
        kernel,
        bias,
        contracting_dims=contracting_dims,
        batch_dims=batch_dims,
        activation=activation,
        quantizers=quantizers,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        input_sharding=input_sharding,
        precise_accumulation=precise_accumulation,
    )
    return out


def linear(
    name: str,
    given: Input,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    contracting_dims: Dims = ((-1,), (0,)),
    batch_dims: Dims = ((), ()),
    activation: Activation | None = None,
    quantizers: DenseQuantizers | None = None,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    input_sharding: PartitionSpec | None = None,
    precise_accumulation: bool = False,
    grouped: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """A dense layer's product, of an array or of its norm, and what was normalised, for `name`.

    grouped: the first free dim of the kernel is short, and another one is cut over devices.
    """
    check_activation(name, activation)
    x = given.x
    kernel, bias = check.arrays(name, kernel=kernel, bias=bias)
    contracting, like = check.gemm_dims(name, x, kernel, contracting_dims, batch_dims)
    dtype = jax.numpy.result_type(x, kernel)
    op = GemmOp(
        name="gemm",
        contracting=contracting,
        batch_like=like,
        bias=bias is not None,
        activation=activation,
        out_dtype=check.float_dtype(name, "out_dtype", out_dtype, dtype),
        cheapest=isinstance(out_sharding, str) and out_sharding == "cheapest",
        precise=check.flag(name, "precise_accumulation", precise_accumulation),
        kernel=config.runs_as_kernel("gemm"),
    )
    dims = op.dims((x.shape, kernel.shape))
    check.out_sharding(name, out_sharding, dims.out_shape, array_type.mesh_of(x, kernel))
    if bias is not None:
        check.shape(name, "bias", bias, tuple(kernel.shape[j] for j in dims.rhs_free))
    if input_sharding is not None:
        check_input_sharding(name, x, input_sharding)
    if quantizers is None:
        plain, residual = given.plain()
        if input_sharding is not None:
            plain = checkpoint_policies.gather(plain, input_sharding)
        return product(op, *check.promoted(plain, kernel), bias, out_sharding), residual
    check_quantizers(name, "quantizers", quantizers)
    form = canonical(
        x,
        kernel,
        contracting,
        like[0],
        out_sharding,
        blocks=quantizers.input.block is not None,
        grouped=grouped,
    )
    residual = None
    if contracting[0] != (x.ndim - 1,):
        plain, residual = given.plain()
        given = Input(plain)
    quantized = given.quantized(form, quantizers.input)
    parts = quantized.parts
    if input_sharding is not None:
        parts = gathered(parts, form.input_spec(to_spec(input_sharding, x.ndim)))
    out = quantized_product(
        Form(name, form.rows, form.k, form.groups, form.row_like),
        op,
        parts,
        quantized.straight,
        form.kernel(kernel),
        None if bias is None else form.bias(bias),
        quantizers,
        form.sharding(out_sharding),
    )
    out = form.result(out)
    wanted = check.out_sharding(name, out_sharding, out.shape, array_type.mesh_of(out))
    if form.merged_rows and wanted is not None:  # axes of size 1 are lost where rows are merged
        out = array_type.laid_out(out, wanted)
    return out, quantized.residual if residual is None else residual
