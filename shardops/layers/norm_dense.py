"""A norm and a dense layer."""

from typing import Any, Literal

import jax

from shardops.errors import wrong
from shardops.layers.activations import check_activation
from shardops.layers.dense import Dims, linear
from shardops.layers.names import NORM, named
from shardops.primitives import check
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_op import Activation
from shardops.primitives.norm import layer_norm, rms_norm

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
    quantizers: Any = None,
    return_normed: bool = False,
    out_dtype: Any = None,
    out_sharding: OutSharding = None,
    precise_accumulation: bool = False,
) -> Any:
    """Normalise, multiply by a kernel, add a bias and activate."""
    name = "layer_norm_dense"
    check_activation(name, activation)
    normed = normalised(
        name,
        x,
        gamma,
        beta,
        norm=norm,
        epsilon=epsilon,
        zero_centered_gamma=zero_centered_gamma,
    )
    out = linear(
        name,
        normed,
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
    return (out, normed) if check.flag(name, "return_normed", return_normed) else out


def normalised(
    op: str,
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    *,
    norm: Norm,
    epsilon: float,
    zero_centered_gamma: bool,
) -> jax.Array:
    """The norm that a layer begins with."""
    check.one_of(op, "norm", norm, ("layer_norm", "rms_norm"))
    options: dict[str, Any] = {"epsilon": epsilon, "zero_centered_gamma": zero_centered_gamma}
    if norm == "layer_norm":
        return named(layer_norm(x, gamma, beta, **options), NORM)
    if beta is not None:
        want, fix = "None with norm='rms_norm'", "Take norm='layer_norm', or leave beta out."
        raise ValueError(wrong(op, "beta", "given", want, fix))
    return named(rms_norm(x, gamma, **options), NORM)
