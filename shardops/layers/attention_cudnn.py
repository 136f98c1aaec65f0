"""cuDNN's flash attention, by `jax.nn.dot_product_attention`: where it fits, and on meshes."""

from typing import Any

import jax
import jax.numpy as jnp

from shardops import array_type
from shardops.rules.spec import only, to_partition_spec

_MOST_FEATURES = 128  # a head, on every architecture from sm_80 on


def taken(
    implementation: Any,
    query: jax.Array,
    key: jax.Array,
    causal: bool,
    masked: bool,
    sequence: int = 1,
) -> bool:
    """Whether cuDNN computes this attention: where it is asked for, or fits and nothing is.

    sequence: which dim of query and key it is.
    """
    if implementation == "softmax":
        return False
    reason = _misfit(query, key, causal, masked, sequence)
    if implementation == "cudnn" and reason:
        raise NotImplementedError(
            f'attention: implementation is "cudnn"; expected None or "softmax" here, as {reason}. '
            "With None it takes cuDNN where that fits."
        )
    return not reason


def _misfit(query: jax.Array, key: jax.Array, causal: bool, masked: bool, sequence: int) -> str:
    """Why cuDNN cannot, or nothing."""
    d = query.shape[-1]
    if query.dtype.itemsize != 2:
        return f"the operands are {query.dtype} and cuDNN has bfloat16 and float16"
    if d % 8 or d > _MOST_FEATURES:
        return f"a head has {d} features and cuDNN has multiples of 8 up to {_MOST_FEATURES}"
    if masked:
        return "an explicit mask is given"
    queries, keys = query.shape[sequence], key.shape[sequence]
    if causal and queries != keys:
        return f"there are {queries} queries and {keys} keys under a causal mask"
    if queries % 2 or keys % 2:
        return f"its gradient takes even lengths, and there are {queries} queries and {keys} keys"
    if query.size == 0 or key.size == 0:
        return "an operand has no elements"
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}"
    return ""


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, lengths: jax.Array | None
) -> jax.Array:
    """Attention of each device's batch and heads."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *lengths: jax.Array) -> jax.Array:
        # What cuDNN gives where there is no key, nothing says: it gets one, and no query sees it.
        some = jnp.maximum(lengths[0], 1) if lengths else None
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=some, implementation="cudnn"
        )
        return jnp.where(lengths[0][:, None, None, None] > 0, mixed, 0) if lengths else mixed

    operands = [query, key, value]
    if lengths is not None:
        operands.append(lengths.astype(jnp.int32))
    mesh = array_type.mesh_of(query)
    if not mesh.explicit_axes:
        return local(*operands)  # on Auto axes JAX partitions it by batch and heads
    batch, _, heads, _ = only(array_type.type_spec(query), mesh.explicit_axes)
    specs = [(batch, (), heads, ())] * 3 + [(batch,)] * (lengths is not None)
    laid_out = [
        array_type.resharded(a, mesh, spec) for a, spec in zip(operands, specs, strict=True)
    ]
    partitions = tuple(to_partition_spec(spec) for spec in specs)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=partitions,
        out_specs=partitions[0],
        axis_names={*mesh.explicit_axes},
        check_vma=False,  # the call of cuDNN says of no axis that its results vary over it
    )(*laid_out)
