"""The dims of a dense layer in the order in which 8-bit products want them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardops import array_type
from shardops.primitives.gemm import OutSharding
from shardops.rules.spec import Spec, to_partition_spec

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Canonical:
    """x [*rows, *k] and kernel [*k, *groups, n] of a product with the result [*rows, *groups, n].

    Dims are merged where nothing moves for it: a quantiser's blocks do not reach over the end of
    one. Rows stay apart on a mesh, where they are cut over different axes; so does a group.

    Args:
      rows, k, groups: how many dims.
      x_order, kernel_order: dims of the operands, in the canonical order.
      row_order: the rows of x in this order, the longest last where blocks lie along it.
      merged_rows, merged_k, merged_n: whether dims became one.
      shape: of the result, its rows in `row_order`.
    """

    rows: int
    k: int
    groups: int
    x_order: Dims
    kernel_order: Dims
    row_order: Dims
    merged_rows: bool
    merged_k: bool
    merged_n: bool
    shape: Dims
    row_like: Dims  # rows that are batch-like

    def x(self, x: jax.Array) -> jax.Array:
        """x in canonical form."""
        x = _transposed(x, self.x_order)
        if self.merged_k:
            x = merge(x, len(self.row_order), x.ndim)
        if self.merged_rows:
            x = merge(x, 0, len(self.row_order))
        return x

    def kernel(self, kernel: jax.Array) -> jax.Array:
        """The kernel in canonical form."""
        kernel = _transposed(kernel, self.kernel_order)
        contracted = len(self.x_order) - len(self.row_order)
        if self.merged_n:
            kernel = merge(kernel, contracted, kernel.ndim)
        if self.merged_k:
            kernel = merge(kernel, 0, contracted)
        return kernel

    def bias(self, bias: jax.Array) -> jax.Array:
        """The bias as [*groups, n]."""
        return merge(bias, 0, bias.ndim) if self.merged_n else bias

    def result(self, out: jax.Array) -> jax.Array:
        """A canonical result with the dims of the layer's."""
        n_rows = len(self.row_order)
        if self.merged_n:
            out = unmerge(out, out.ndim - 1, self.shape[n_rows:])
        return self.with_rows(out)

    def with_rows(self, out: jax.Array) -> jax.Array:
        """An array of canonical rows with the rows of the layer's."""
        n_rows = len(self.row_order)
        if self.merged_rows:
            out = unmerge(out, 0, self.shape[:n_rows])
        back = sorted(range(n_rows), key=lambda i: self.row_order[i])
        rest = range(len(back), out.ndim)
        return _transposed(out, (*back, *rest))

    def input_spec(self, spec: Spec) -> Spec:
        """The spec of the canonical x, from that of x."""
        entries = tuple(spec[d] for d in self.x_order)
        n_rows = len(self.row_order)
        rows = ((),) if self.merged_rows else entries[:n_rows]
        return (*rows, *(entries[n_rows : n_rows + 1] if self.merged_k else entries[n_rows:]))

    def sharding(self, wanted: OutSharding) -> OutSharding:
        """The sharding of the canonical result, from that of the layer's."""
        if isinstance(wanted, NamedSharding):
            wanted = wanted.spec
        if not isinstance(wanted, PartitionSpec):
            return wanted
        entries = (*wanted.partitions, *(None,) * (len(self.shape) - len(wanted)))
        n_rows = len(self.row_order)
        rows = tuple(entries[d] for d in self.row_order)
        free = entries[n_rows:]
        if self.merged_rows:  # nothing cuts them
            rows = (None,)
        if self.merged_n:
            free = free[:1] or (None,)
        return PartitionSpec(*rows, *free, unreduced=wanted.unreduced)


def canonical(
    x: jax.Array,
    kernel: jax.Array,
    contracting: tuple[Dims, Dims],
    row_like: Dims,
    out_sharding: OutSharding,
    *,
    blocks: bool,
    grouped: bool,
) -> Canonical:
    """The canonical form of a product.

    Args:
      row_like: dims of x that are batch-like.
      blocks: whether scales are of blocks.
      grouped: whether the first free dim of the kernel is short and the last one cut over devices.
    """
    local = _on_one_device(x, kernel)
    pairs = sorted(zip(*contracting, strict=True), key=lambda pair: pair[1])
    x_k, kernel_k = (tuple(p[i] for p in pairs) for i in range(2))
    x_rows = tuple(d for d in range(x.ndim) if d not in x_k)
    free = tuple(d for d in range(kernel.ndim) if d not in kernel_k)
    row_order = tuple(range(len(x_rows)))
    if blocks and not local and x_rows:
        longest = max(row_order, key=lambda i: (x.shape[x_rows[i]], i))
        row_order = (*(i for i in row_order if i != longest), longest)
    x_order = (*(x_rows[i] for i in row_order), *x_k)
    kernel_order = (*kernel_k, *free)
    merged_k = local or (_mergeable(x, x_k) and _mergeable(kernel, kernel_k))
    merged_n = local or (
        not grouped and _mergeable(kernel, free) and _spec_mergeable(out_sharding, len(x_rows))
    )
    merged_n = merged_n or not free
    merged_rows = local or not x_rows
    return Canonical(
        1 if merged_rows else len(x_rows),
        1 if merged_k else len(x_k),
        0 if merged_n else len(free) - 1,
        x_order,
        kernel_order,
        row_order,
        merged_rows,
        merged_k,
        merged_n,
        (*(x.shape[d] for d in x_order[: len(x_rows)]), *(kernel.shape[d] for d in free)),
        () if merged_rows else tuple(i for i, r in enumerate(row_order) if x_rows[r] in row_like),
    )


def _on_one_device(*arrays: jax.Array) -> bool:
    """Whether dims may be merged freely: no axis that is left to JAX cuts them."""
    mesh = array_type.mesh_of(*arrays)
    if mesh.empty:
        return jax.device_count() == 1
    return all(mesh.shape[a] == 1 for a in (*mesh.explicit_axes, *mesh.auto_axes))


def _mergeable(array: jax.Array, dims: Dims) -> bool:
    """Whether merging dims moves nothing: but for the first one they are whole on each device.

    On Auto axes the type does not say; dims that are cut there are first ones in all usual layouts.
    """
    spec = array_type.explicit_spec(array)
    return spec is None or not any(spec[d] for d in dims[1:])


def _spec_mergeable(wanted: OutSharding, rows: int) -> bool:
    spec = wanted.spec if isinstance(wanted, NamedSharding) else wanted
    if not isinstance(spec, PartitionSpec):
        return True
    return all(entry is None for entry in spec.partitions[rows + 1 :])


def _transposed(array: jax.Array, order: Dims) -> jax.Array:
    return array if order == tuple(range(array.ndim)) else jnp.transpose(array, order)


def merge(array: jax.Array, start: int, stop: int) -> jax.Array:
    """Dims from `start` to `stop` as one; a new dim of size 1 where there are none."""
    sizes = (*array.shape[:start], prod(array.shape[start:stop]), *array.shape[stop:])
    if sizes == array.shape:
        return array
    spec = array_type.explicit_spec(array)
    if spec is not None:
        spec = (*spec[:start], spec[start] if stop > start else (), *spec[stop:])
    return _reshaped(array, sizes, spec)


def unmerge(array: jax.Array, dim: int, sizes: Sequence[int]) -> jax.Array:
    """A dim as several; axes that cut it cut the first of them."""
    shape = (*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
    if shape == array.shape:
        return array
    spec = array_type.explicit_spec(array)
    if spec is not None:
        spec = (*spec[:dim], *(spec[dim], *((),) * len(sizes))[: len(sizes)], *spec[dim + 1 :])
    return _reshaped(array, shape, spec)


def _reshaped(array: jax.Array, sizes: Sequence[int], spec: Spec | None) -> jax.Array:
    if spec is None:
        return array.reshape(sizes)
    sharding = NamedSharding(array_type.mesh_of(array), to_partition_spec(spec))
    return jax.lax.reshape(array, sizes, out_sharding=sharding)
