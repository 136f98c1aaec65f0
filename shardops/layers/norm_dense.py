"""A norm and a dense layer."""

from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from shardops.layers.dense import Dims, linear
from shardops.layers.operands import Input, normed
from shardops.primitives import check
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_op import Activation
from shardops.quantizer import DenseQuantizers

Norm = Literal["layer_norm", "rms_norm"]


def layer_norm_dense(
    x: jax.Array,
    gamma: jax.Array,
    kernel: jax.Array,
    *,
    beta: jax.Array | None = None,
    bias: jax.Array | None = None,
    norm: Norm = "layer_norm",
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    contracting_dims: Dims = ((-1,), (0,)),
    batch_dims: Dims = ((), ()),
    activation: Activation | None = None,
    quantizers: DenseQuantizers | None = None,
    add: jax.Array | None = None,
    return_input: bool = False,
    return_normed: bool = False,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    input_sharding: PartitionSpec | None = None,
    precise_accumulation: bool = False,
) -> Any:
    """Normalise, multiply by a kernel, add a bias and activate.

        s = x + add,  n[*r, h] = norm(s)[*r, h],  y = activation(n · kernel + bias)

    With `quantizers` the norm is quantised from float32 as it is computed, by one launch on a GPU
    where its kernel does so, and is nowhere kept in 16 bits: for the backward pass there are x,
    its statistics and the norm in 8 bits. Derivatives as of `dense`.

    Args:
      x: [*r, h] float32 | bfloat16 | float16.
      gamma, beta: [h]; beta with norm="layer_norm" alone, or None.
      kernel, bias, contracting_dims, batch_dims, activation, quantizers, out_dtype, out_sharding,
        input_sharding, precise_accumulation: as of `dense`. `input_sharding` is of n.
      norm: "layer_norm" | "rms_norm".
      epsilon, zero_centered_gamma: as of `shardops.layer_norm`.
      add: [*r, h], dtype of x: a residual, summed by the kernel of the norm.
      return_input: also return s, rounded to the dtype of x; its cotangent joins that of x in the
        norm's backward kernel.
      return_normed: also return n in the dtype of x. With `quantizers` it is then quantised after
        it is rounded.
    Returns: y, or a tuple of it and, in this order, of n and s, those that are asked for.
    Raises: as `dense` and the norms do.
    Sharding: as of the norm, then as of `dense`.
    Source: as of the norms and of `dense`.
    """
    name = "layer_norm_dense"
    x, gamma, beta, add = check.arrays(name, x=x, gamma=gamma, beta=beta, add=add)
    options: dict[str, Any] = {"epsilon": epsilon, "zero_centered_gamma": zero_centered_gamma}
    given: Input = normed(name, x, gamma, beta, norm, options, add, return_input)
    normalised = residual = None
    if check.flag(name, "return_normed", return_normed):
        normalised, residual = given.plain()
        given = Input(normalised)
    out, seen = linear(
        name,
        given,
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
    more = (normalised, residual if seen is None else seen)
    returned = (out, *(a for a in more if a is not None))
    return returned if len(returned) > 1 else out
