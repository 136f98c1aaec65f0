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
    return_normed: bool = False,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    input_sharding: PartitionSpec | None = None,
    precise_accumulation: bool = False,
) -> Any:
    """Normalise, multiply by a kernel, add a bias and activate."""
    name = "layer_norm_dense"
    x, gamma, beta = check.arrays(name, x=x, gamma=gamma, beta=beta)
    options: dict[str, Any] = {"epsilon": epsilon, "zero_centered_gamma": zero_centered_gamma}
    given: Input = normed(name, x, gamma, beta, norm, options)
    if check.flag(name, "return_normed", return_normed):
        given = Input(given.plain())
    out = linear(
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
    return (out, given.x) if return_normed else out
