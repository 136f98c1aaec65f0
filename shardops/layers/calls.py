"""What the modules of `nnx` and `linen` call: layers of parameters that they keep."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import shardops as so
from shardops.errors import wrong
from shardops.layers.axes import Layout
from shardops.layers.modules import check_rows, inputs_of
from shardops.layers.projections import Norm, Weights
from shardops.layers.transformer import (
    AttentionWeights,
    Heads,
    MLPWeights,
    Tokens,
    mlp,
    self_attention,
    transformer_layer,
)


def promoted(dtype: Any, *arrays: jax.Array | None) -> list[Any]:
    """Arrays in `dtype`, or in their common one."""
    given = [a for a in arrays if a is not None]
    _check_mesh(given)
    target = jnp.result_type(*given) if dtype is None else dtype
    return [None if a is None else a.astype(target) for a in arrays]


def _check_mesh(arrays: list[jax.Array]) -> None:
    """Refuse parameters of another mesh: JAX names neither."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    here = jax.sharding.get_abstract_mesh()
    for mesh in meshes:
        if not mesh.empty and not here.empty and dict(mesh.shape) != dict(here.shape):
            fix = "Make the module on this mesh, or put its state there (jax.device_put)."
            raise ValueError(wrong("layers", "an array", f"on {mesh}", f"one on {here}", fix))


def dense(
    x: jax.Array,
    weights: Weights,
    axis: tuple[int, ...],
    *,
    dtype: Any,
    activation: Any,
    quantizers: Any,
    out_sharding: PartitionSpec | None,
) -> jax.Array:
    """`so.dense` over the dims `axis` of x and the first ones of the kernel."""
    inputs = weights.kernel.shape[: len(axis)]
    if inputs_of(x, axis) != inputs:
        fix = "These are the input dims of the kernel."
        want = f"{inputs} along dims {axis}"
        raise ValueError(wrong("Dense", "x", f"of shape {x.shape}", want, fix))
    x, kernel, bias = promoted(dtype, x, *weights)
    batch = () if x.ndim == len(axis) or any(a % x.ndim == 0 for a in axis) else (0,)
    return so.dense(
        x,
        kernel,
        bias,
        contracting_dims=(axis, tuple(range(len(axis)))),
        batch_dims=(batch, ()),
        activation=activation,
        quantizers=quantizers,
        out_sharding=out_sharding,
    )


def norm(x: jax.Array, of: Norm, dtype: Any) -> jax.Array:
    """The norm, in the wider dtype of x and the result."""
    target = jnp.result_type(x, of.gamma) if dtype is None else dtype
    wide = x.astype(jnp.result_type(x.dtype, target))
    options: dict[str, Any] = {
        "epsilon": of.epsilon,
        "zero_centered_gamma": of.zero_centered_gamma,
    }
    if of.norm == "rms_norm":
        return so.rms_norm(wide, of.gamma, **options).astype(target)
    return so.layer_norm(wide, of.gamma, of.beta, **options).astype(target)


def norm_dense(
    x: jax.Array,
    of: Norm,
    weights: Weights,
    *,
    dtype: Any,
    activation: Any,
    quantizers: Any,
    out_sharding: PartitionSpec | None,
) -> jax.Array:
    """`so.layer_norm_dense` of modules' parameters."""
    x, kernel, bias = promoted(dtype, x, *weights)
    return so.layer_norm_dense(
        x,
        of.gamma,
        kernel,
        beta=of.beta,
        bias=bias,
        norm=of.norm,
        epsilon=of.epsilon,
        zero_centered_gamma=of.zero_centered_gamma,
        batch_dims=((0,) if x.ndim > 1 else (), ()),
        activation=activation,
        quantizers=quantizers,
        out_sharding=out_sharding,
    )


def norm_mlp(
    x: jax.Array,
    of: Norm,
    weights: MLPWeights,
    *,
    dtype: Any,
    activation: Any,
    quantizers: Any,
    layout: Layout,
) -> jax.Array:
    """`so.layer_norm_mlp` of modules' parameters."""
    check_rows("LayerNormMLP", x, layout)
    if not layout.batch_first and x.ndim != 3:  # its second dim is the batch
        want, fix = "[sequence, batch, features]", "Merge or split dims, or leave batch_first out."
        raise ValueError(wrong("LayerNormMLP", "x", f"of shape {x.shape}", want, fix))
    x, weights = in_dtype(dtype, x, weights)
    return mlp(x, weights, of, activation, layout=layout, quantizers=quantizers)


def attend(
    x: jax.Array,
    kv: jax.Array | None,
    weights: AttentionWeights,
    heads: Heads,
    *,
    dtype: Any,
    tokens: Tokens,
    quantizers: Any,
    layout: Layout,
) -> jax.Array:
    """`self_attention` of modules' parameters, without a norm."""
    check_rows("MultiHeadAttention", x, layout)
    x, kv, weights = in_dtype(dtype, x, kv, weights)
    out, _ = self_attention(
        x, weights, heads, kv=kv, tokens=tokens, quantizers=quantizers, layout=layout
    )
    return out


def layer(
    x: jax.Array,
    norms: tuple[Norm, Norm],
    weights: tuple[AttentionWeights, MLPWeights],
    heads: Heads,
    *,
    dtype: Any,
    activation: Any,
    tokens: Tokens,
    quantizers: Any,
    layout: Layout,
) -> jax.Array:
    """`transformer_layer` of modules' parameters."""
    check_rows("TransformerLayer", x, layout)
    x, (attention_weights, mlp_weights) = in_dtype(dtype, x, weights)
    return transformer_layer(
        x,
        norms[0],
        attention_weights,
        norms[1],
        mlp_weights,
        heads=heads,
        activation=activation,
        tokens=tokens,
        layout=layout,
        quantizers=quantizers,
    )


def in_dtype(dtype: Any, *trees: Any) -> Any:
    """Trees of arrays in `dtype`, or in their common one."""
    leaves, structure = jax.tree.flatten(trees)
    return jax.tree.unflatten(structure, promoted(dtype, *leaves))
