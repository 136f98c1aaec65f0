"""What the modules of `nnx` and `linen` share of their parameters: all but how they are kept."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from shardops import array_type
from shardops.errors import shown, wrong
from shardops.layers import arguments
from shardops.layers.axes import Layout, Names, Rules, on_mesh, resolvable, resolve
from shardops.layers.transformer import Heads
from shardops.primitives import check
from shardops.rules.spec import to_spec

# Logical axes of the kernels of a transformer layer, and of their biases. A bias of the stream, and
# the parameters of norms, are whole on each device: cutting a vector saves nothing.
QUERY: Names = ("embed", "heads", "head_dim")
KEY_VALUE: Names = ("embed", "kv_heads", "head_dim")
OUT: Names = ("heads", "head_dim", "embed")
DOWN: Names = ("mlp", "embed")
VECTOR: Names = (None,)

KINDS = {"decoder": "causal", "encoder": "none"}  # of a transformer layer: its mask, unpadded


def with_fan_in(init: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """An initializer that draws [*in, *out] as the matrix [in, out], as Flax's general layers do.

    inputs: how many of the dims are input dims.
    """

    def flat(key: Any, shape: Sequence[int], dtype: Any) -> jax.Array:
        matrix = (prod(shape[:inputs]), prod(shape[inputs:]))
        return jnp.reshape(init(key, matrix, dtype), shape)

    return flat


def on_mixed_axes() -> bool:
    """Whether the mesh has Explicit and Auto axes: Flax places no arrays there, and fails."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.explicit_axes) and bool(mesh.auto_axes)


def cut_twice(names: Names, rules: Rules) -> bool:
    """Whether rules put two dims on one axis: the first rule has it here, and Flax's NNX fails."""
    given = dict(reversed(rules))
    axes = jax.tree.leaves([given.get(name) for name in names if name is not None])
    return len({*axes}) < len(axes)


def placed(init: Callable[..., Any], names: Names | None, rules: Rules) -> Callable[..., Any]:
    """An initializer whose value lies where rules put it on the ambient mesh.

    On Explicit axes the types of arrays say how they are sharded, and Flax's metadata is only
    compared to it.
    """

    def on_it(*args: Any) -> jax.Array:
        value, lies = init(*args), on_mesh(names, rules)
        if lies is None:
            return value
        return array_type.constrain(value, to_spec(lies, value.ndim))

    return on_it


def axis_for(inputs: tuple[int, ...], axis: int | Sequence[int]) -> tuple[int, ...]:
    """The contracted dims of x, one for each input dim of a kernel."""
    dims = arguments.dims("Dense", "axis", axis)
    if len(dims) != len(inputs):
        fix = "Each input dim of the kernel is a dim of x."
        raise ValueError(wrong("Dense", "axis", shown(axis), f"{len(inputs)} dims", fix))
    return dims


def inputs_of(x: jax.Array, axis: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the dims of x that are contracted."""
    return tuple(x.shape[a] for a in check.dims_of("Dense", "axis", axis, x))


def dense_axes(
    op: str, shape: tuple[int, ...], inputs: int, of_kernel: Any, of_bias: Any, rules: Rules
) -> tuple[Names | None, Names | None]:
    """Logical axes of a kernel and of its bias: those of the kernel's features by default."""
    names = arguments.names(op, "kernel_axes", of_kernel, len(shape))
    if names is not None:
        _check_parameter(op, "kernel", shape, names, rules)
    if of_bias is None:
        return names, None if names is None else names[inputs:]
    return names, arguments.names(op, "bias_axes", of_bias, len(shape) - inputs)


def hidden_shape(features: int, activation: Any) -> tuple[int, ...]:
    """Output dims of the kernel into hidden features: two of them side by side for a gate."""
    return (2, features) if isinstance(activation, tuple | list) else (features,)


def up_axes(activation: Any) -> Names:
    """Logical axes of that kernel."""
    return ("embed", None, "mlp") if isinstance(activation, tuple | list) else ("embed", "mlp")


def heads_of(kind: str, padded: bool, features: int, **options: Any) -> Heads:
    """The attention of a transformer layer, of a decoder or of an encoder."""
    if kind not in KINDS:
        want = " | ".join(repr(k) for k in KINDS)
        raise ValueError(wrong("TransformerLayer", "kind", shown(kind), want, "Choose one."))
    mask = {"causal": ("causal", "padding_causal"), "none": ("none", "padding")}[KINDS[kind]]
    num_heads, kv, head_dim = (options.pop(n) for n in ("num_heads", "num_kv_heads", "head_dim"))
    op = "TransformerLayer"
    return Heads.of(features, num_heads, kv, head_dim, op=op, mask_kind=mask[padded], **options)


def check_split(op: str, heads: Heads, rules: Rules) -> None:
    """Refuse heads that the devices along their axes do not divide."""
    sizes = jax.sharding.get_abstract_mesh().shape
    for name, count, argument in (
        ("heads", heads.num_heads, "num_heads"),
        ("kv_heads", heads.num_kv_heads, "num_kv_heads"),
    ):
        (entry,) = resolve((name,), rules)
        devices = _devices(entry, sizes)
        if count % devices:
            want = f"a multiple of the {devices} devices along {entry!r}, where rules put {name!r}"
            fix = "Map 'kv_heads' to None (a preset's replicate_kv=True)."
            if name == "heads":
                fix = "Take other numbers, or map 'heads' to None."
            raise ValueError(wrong(op, argument, shown(count), want, fix))


def _check_parameter(
    op: str, argument: str, shape: tuple[int, ...], names: Names, rules: Rules
) -> None:
    """Refuse dims of a parameter that cannot be placed where rules put them."""
    sizes = jax.sharding.get_abstract_mesh().shape
    given = [name for name in names if name is not None]
    if len({*given}) < len(given):
        fix = "Give the dims different names, or None."
        raise ValueError(wrong(op, argument, shown(names), "each name once", fix))
    if not sizes or not resolvable(names, rules):
        return
    lies = on_mesh(names, rules)
    assert lies is not None
    fix = "Take another number of features"
    _check_divided(op, argument, shape, names, lies.partitions, fix)


def _check_divided(
    op: str, argument: str, shape: tuple[int, ...], names: Names, entries: Any, fix: str
) -> None:
    """Refuse dims that the devices along their axes do not divide."""
    sizes = jax.sharding.get_abstract_mesh().shape
    for name, size, entry in zip(names, shape, entries, strict=False):
        devices = _devices(entry, sizes)
        if size % devices:
            want = (
                f"a multiple of the {devices} devices along {entry!r} for its dim {name!r}, which "
                "rules put there"
            )
            fix = f"{fix}, or map {name!r} to None."
            raise ValueError(wrong(op, argument, f"of shape {shape}", want, fix))


def _devices(entry: Any, sizes: Any) -> int:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return prod(sizes.get(axis, 1) for axis in axes)


def check_rows(op: str, x: jax.Array, layout: Layout) -> None:
    """Refuse an input whose rows rules cannot put where they say."""
    if layout.stream is None:
        return
    first = ("batch", "sequence") if layout.batch_first else ("sequence", "batch")
    if x.ndim != 3:
        fix = "Rules say where these dims lie: merge or split dims of x, or leave rules out."
        want = f"[{first[0]}, {first[1]}, features]"
        raise ValueError(wrong(op, "x", f"of shape {x.shape}", want, fix))
    _check_divided(op, "x", x.shape, first, layout.stream.partitions, "Pad x")


def gathering(op: str, x: jax.Array, layout: Layout) -> Layout:
    """The layout of `keep_gathered`, where an input can be kept."""
    mesh = jax.sharding.get_abstract_mesh()
    if layout.stream is None:
        return layout
    if mesh.auto_axes:
        want, fix = "False on a mesh with Auto axes", "Make all axes Explicit, or leave it out."
        raise ValueError(wrong(op, "keep_gathered", "True", want, fix))
    if mesh.explicit_axes and array_type.type_spec(x) != to_spec(layout.stream, x.ndim):
        lies = jax.typeof(x).sharding.spec
        fix = "Place it there first (jax.sharding.reshard), or leave keep_gathered out."
        raise ValueError(
            wrong(op, "x", f"at {lies}", f"{layout.stream}, with keep_gathered=True", fix)
        )
    return layout.gathering()


def check_whole(op: str, argument: str, got: int, want: int) -> None:
    """Refuse parameters that are shards: a module would leave the sums over them out, silently."""
    if got != want:
        fix = (
            "Inside a shard_map over the axis that cuts them, write the products and their sums "
            "by hand (docs: Code in shard_map), or leave the axis out of axis_names."
        )
        raise ValueError(wrong(op, argument, f"of {got}", f"the module's {want}", fix))


def pair_of(first: Any, second: Any) -> Any:
    """Quantisers of two products, or None."""
    return None if first is None else (first, second)
