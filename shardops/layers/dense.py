"""A dense layer: activation(x · kernel + bias)."""

from collections.abc import Sequence
from typing import Any

import jax

from shardops import config
from shardops.layers.activations import check_activation
from shardops.layers.product import product
from shardops.primitives import check
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_op import Activation, GemmOp

Dims = tuple[Sequence[int], Sequence[int]]


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    contracting_dims: Dims = ((-1,), (0,)),
    batch_dims: Dims = ((), ()),
    activation: Activation | None = None,
    quantizers: Any = None,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    precise_accumulation: bool = False,
) -> jax.Array:
    """Multiply by a kernel, add a bias and activate."""
    check_activation("dense", activation)
    return linear(
        "dense",
        x,
        kernel,
        bias,
        contracting_dims=contracting_dims,
        batch_dims=batch_dims,
        activation=activation,
        quantizers=quantizers,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        precise_accumulation=precise_accumulation,
    )


def linear(
    name: str,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    contracting_dims: Dims = ((-1,), (0,)),
    batch_dims: Dims = ((), ()),
    activation: Activation | None = None,
    quantizers: Any = None,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    precise_accumulation: bool = False,
) -> jax.Array:
    """What `dense` does, for the layer `name`."""
    if quantizers is not None:
        raise NotImplementedError(f"{name}: quantizers is given; expected None so far.")
    x, kernel, bias = check.arrays(name, x=x, kernel=kernel, bias=bias)
    x, kernel = check.promoted(x, kernel)
    contracting, like = check.gemm_dims(name, x, kernel, contracting_dims, batch_dims)
    op = GemmOp(
        name="gemm",
        contracting=contracting,
        batch_like=like,
        bias=bias is not None,
        activation=activation,
        out_dtype=check.float_dtype(name, "out_dtype", out_dtype, x.dtype),
        cheapest=isinstance(out_sharding, str) and out_sharding == "cheapest",
        precise=check.flag(name, "precise_accumulation", precise_accumulation),
        kernel=config.runs_as_kernel("gemm"),
    )
    if bias is not None:
        dims = op.dims((x.shape, kernel.shape))
        check.shape(name, "bias", bias, tuple(kernel.shape[j] for j in dims.rhs_free))
    return product(op, x, kernel, bias, out_sharding)
