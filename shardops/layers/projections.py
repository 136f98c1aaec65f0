"""The products around attention: queries, keys and values of one input by one product.

The kernels lie apart, as in Flax: query [d, heads, head_dim], key and value [d, kv_heads,
head_dim]. They are multiplied as one,

    [d, groups, n, head_dim],  n = heads / groups (queries) + 1 (key) + 1 (value)

where a group is the queries that share a key. Heads of all three are cut over the mesh alike, by
groups, so putting them together and taking the result apart moves nothing; the input is gathered
once, and its cotangent scattered once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import shardops as so
from shardops import array_type
from shardops.errors import wrong
from shardops.rules.spec import Axes, to_spec

NormKind = Literal["layer_norm", "rms_norm"]


class Weights(NamedTuple):
    """A kernel and its bias."""

    kernel: jax.Array
    bias: jax.Array | None = None


@dataclass(frozen=True)
class Norm:
    """The norm before a product: its parameters and what kind it is."""

    gamma: jax.Array
    beta: jax.Array | None = None
    norm: NormKind = "rms_norm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False


def projected(
    x: jax.Array,
    parts: Sequence[Weights],
    *,
    norm: Norm | None = None,
    quantizers: Any = None,
    heads: PartitionSpec | None = None,
    gathered: PartitionSpec | None = None,
    batch: int = 0,
) -> tuple[list[jax.Array], jax.Array]:
    """Multiply x by several kernels with heads, all at once.

    Args:
      x: [batch, length, d], or [length, batch, d].
      parts: kernels [d, heads of each, head_dim], biases [heads of each, head_dim], all or none.
        Each number of heads is a multiple of the smallest.
      norm: applied to x first.
      quantizers: of one product, as for `so.dense`.
      heads: sharding of [batch, length, heads, head_dim].
      gathered: as in `Layout`.
      batch: which dim of x it is; results have their first two dims in the order of x.
    Returns: of each part [batch, length, heads, head_dim], and x for a sum after the norm: its
      cotangent joins that of the norm in one kernel. Of a part that has fewer heads than devices
      along the axes of `heads`, each head as often as makes them as many: every device then
      computes the heads that its queries need.
    Raises: ValueError where heads do not divide.
    Sharding: what one product of x and all kernels side by side moves.
    """
    split = _heads_axes(parts[0].kernel, heads)
    groups = _groups([part.kernel.shape[1] for part in parts], split, x)
    grouped = [_grouped(part, groups, split) for part in parts]
    kernel = jnp.concatenate([part.kernel for part in grouped], axis=2)
    biases = [part.bias for part in grouped if part.bias is not None]
    bias = jnp.concatenate(biases, axis=1) if biases else None
    sharding = None if heads is None else PartitionSpec(*_padded(heads, 3))
    out, x = _product(
        x,
        norm,
        kernel,
        bias=bias,
        quantizers=quantizers,
        out_sharding=sharding,
        input_sharding=gathered,
        batch_dims=((batch,), ()),
    )
    # Not slices: the cotangent of a split is one concatenation, of slices a sum of padded arrays.
    cut = jax.lax.split(out, [part.kernel.shape[2] for part in grouped], axis=3)
    return [_laid_out(_with_heads(part), heads) for part in cut], x


def joined(
    mixed: jax.Array,
    weights: Weights,
    *,
    quantizers: Any = None,
    heads: PartitionSpec | None = None,
    stream: PartitionSpec | None = None,
    batch: int = 0,
) -> jax.Array:
    """Multiply what attention gives, [batch, length, heads, head_dim], back into the stream.

    weights: kernel [heads, head_dim, d], bias [d].
    batch: which dim of `mixed` it is.
    Returns: [batch, length, d], sharded as `stream`.
    """
    return so.dense(
        _laid_out(mixed, heads),
        weights.kernel,
        weights.bias,
        contracting_dims=((2, 3), (0, 1)),
        batch_dims=((batch,), ()),
        quantizers=quantizers,
        out_sharding=stream,
    )


def _product(
    x: jax.Array, norm: Norm | None, kernel: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    if norm is None:
        return so.dense(x, kernel, **options), x
    return so.layer_norm_dense(
        x,
        norm.gamma,
        kernel,
        beta=norm.beta,
        norm=norm.norm,
        epsilon=norm.epsilon,
        zero_centered_gamma=norm.zero_centered_gamma,
        return_input=True,
        **options,
    )


def _padded(spec: PartitionSpec, dims: int) -> list[Any]:
    """The entries of batch, length and heads, without those of what a head has."""
    entries = [*spec.partitions, None, None, None]
    return entries[:dims]


def _heads_axes(kernel: jax.Array, heads: PartitionSpec | None) -> Axes:
    """The axes that cut heads: those asked for, else those of the kernel's type."""
    if heads is not None:
        return to_spec(PartitionSpec(*_padded(heads, 3)), 3)[2]
    own = array_type.explicit_spec(kernel)
    return () if own is None else own[1]


def _groups(counts: Sequence[int], split: Axes, x: jax.Array) -> int:
    """How many groups: as many as keys, or as devices where these are more."""
    sizes = array_type.mesh_of(x).shape
    devices = prod(sizes.get(a, 1) for a in split)
    fewest = min(counts)
    groups = fewest if fewest % devices == 0 else devices
    for count in counts:
        if count % fewest or (groups % count and count % groups):
            want = f"numbers that divide each other, and the {devices} devices along {split}"
            fix = "Change num_heads or num_kv_heads, or leave heads whole: map them to None."
            raise ValueError(wrong("attention", "heads", f"{(*counts,)}", want, fix))
    return groups


def _grouped(part: Weights, groups: int, split: Axes) -> Weights:
    """Kernel [d, groups, n, head_dim] and bias [groups, n, head_dim]."""
    kernel, bias = part
    if kernel.shape[1] < groups:
        times = groups // kernel.shape[1]
        kernel = _cut(jnp.repeat(kernel, times, axis=1), 1, split)
        bias = None if bias is None else _cut(jnp.repeat(bias, times, axis=0), 0, split)
    n = kernel.shape[1] // groups
    kernel = jnp.reshape(kernel, (kernel.shape[0], groups, n, kernel.shape[2]))
    if bias is not None:
        bias = jnp.reshape(bias, (groups, n, bias.shape[1]))
    return Weights(kernel, bias)


def _cut(array: jax.Array, dim: int, axes: Axes) -> jax.Array:
    """`array`, one dim of it cut over `axes`, the others as they are."""
    own = array_type.explicit_spec(array)
    if own is not None:
        spec = tuple(axes if d == dim else entry for d, entry in enumerate(own))
        return array_type.laid_out(array, spec)
    spec = tuple(axes if d == dim else () for d in range(array.ndim))
    return array_type.constrain(array, spec, frozenset(range(array.ndim)) - {dim})


def _with_heads(part: jax.Array) -> jax.Array:
    """[batch, length, groups, n, head_dim] -> [batch, length, heads, head_dim]."""
    *rows, groups, n, features = part.shape
    return jnp.reshape(part, (*rows, groups * n, features))


def _laid_out(array: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """An activation where the layout has it, its cotangent too: on Auto axes neither is known."""
    if spec is None:
        return array
    return array_type.constrain(array, to_spec(spec, array.ndim))
