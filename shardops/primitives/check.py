"""Checks of arguments. Each error names op, argument, value and what to do."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardops.array_type import refuse_deferred
from shardops.errors import shown, wrong
from shardops.primitives.check_scaled import scaled
from shardops.primitives.scaling import FLOATS
from shardops.rules.spec import Spec, axes_in, shards, to_spec

_OPTIONAL = ("bias", "beta", "add")


def arrays(op: str, **given: Any) -> list[Any]:
    """The arguments as float arrays; None stays None where it may."""
    return [
        None if a is None and name in _OPTIONAL else _array(op, name, a)
        for name, a in given.items()
    ]


def flag(op: str, argument: str, value: Any) -> bool:
    """A Python bool: flags are static."""
    if not isinstance(value, bool | np.bool_):
        fix = "Flags are static: pass a Python bool."
        raise TypeError(wrong(op, argument, f"a {type(value).__name__}", "True | False", fix))
    return bool(value)


def _array(op: str, name: str, value: Any) -> jax.Array:
    if hasattr(value, "scale_inv"):
        raise NotImplementedError(
            f"{op}: {name} is a ScaledArray; expected an array, as products alone take scaled "
            "ones. Pass `scaled.dequantize(dtype)`."
        )
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            wrong(op, name, f"a {type(value).__name__}", "an array", "Convert it with jnp.asarray.")
        )
    array = of_numpy(op, name, value, " | ".join(FLOATS))
    if array.dtype.name not in FLOATS:
        raise TypeError(
            wrong(op, name, f"of dtype {array.dtype}", " | ".join(FLOATS), f"Cast {name} first.")
        )
    refuse_deferred(f"{op}: {name}, of shape {array.shape},", array)
    return array


def of_numpy(op: str, name: str, value: Any, want: str) -> jax.Array:
    """An array of JAX's or of NumPy's as one of JAX's, which has not all of NumPy's."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ma.MaskedArray):
        fix = f"Pass {name}.filled(...), and a mask where the op takes one."
        raise TypeError(wrong(op, name, "a masked array of NumPy's", want, fix))
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        got = f"of NumPy's dtype {value.dtype}"
        raise TypeError(wrong(op, name, got, want, f"Cast {name} first.")) from error


def dtype_name(value: Any) -> str:
    """The name of a dtype; of what is none, what an error shows."""
    try:
        return jnp.dtype(value).name
    except Exception:  # NumPy's message has the repr of the value, which may fail
        return shown(value)


def float_dtype(op: str, argument: str, value: Any, default: Any) -> str:
    """The name of a supported float dtype."""
    name = dtype_name(default if value is None else value)
    if name not in FLOATS:
        raise TypeError(wrong(op, argument, name, " | ".join(FLOATS), "Cast the result instead."))
    return name


def operands(op: str, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Two float arrays in their common dtype; of ScaledArrays each as it is."""
    if hasattr(lhs, "scale_inv") or hasattr(rhs, "scale_inv"):
        given = {"lhs": lhs, "rhs": rhs}
        check = {True: scaled, False: _array}
        both = [check[hasattr(a, "scale_inv")](op, n, a) for n, a in given.items()]
        return both[0], both[1]
    return promoted(*arrays(op, lhs=lhs, rhs=rhs))


def promoted(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both operands in their common dtype."""
    dtype = jnp.result_type(lhs, rhs)
    return lhs.astype(dtype), rhs.astype(dtype)


def one_of(op: str, argument: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse a value outside a list."""
    try:
        # Arrays, which have no hash, do not say whether they equal a name.
        known = isinstance(value, Hashable) and value in allowed
    except Exception:  # whatever a stranger's comparison raises
        known = False
    if not known:
        want = " | ".join(repr(a) for a in allowed)
        raise ValueError(wrong(op, argument, shown(value), want, "Choose one of these."))


def shape(op: str, argument: str, array: jax.Array, want: tuple[int, ...]) -> None:
    """Refuse another shape."""
    if array.shape != want:
        raise ValueError(
            wrong(op, argument, f"of shape {array.shape}", f"{want}", f"Reshape {argument}.")
        )


def dims_of(op: str, argument: str, dims: Sequence[int], array: jax.Array) -> tuple[int, ...]:
    """Dims counted from the front, each in range and named once."""
    out = []
    for d in dims:
        if isinstance(d, bool) or not isinstance(d, int | np.integer):
            raise TypeError(wrong(op, argument, shown(dims), "integers", "Pass dims as ints."))
        if not -array.ndim <= d < array.ndim:
            raise ValueError(
                wrong(
                    op,
                    argument,
                    shown(tuple(dims)),
                    f"dims of an array of shape {array.shape}",
                    f"Dim {d} does not exist.",
                )
            )
        out.append(int(d) % array.ndim)
    if len(set(out)) < len(out):
        raise ValueError(
            wrong(op, argument, shown(tuple(dims)), "each dim once", "Drop the repeated dim.")
        )
    return tuple(out)


def dim_pair(
    op: str, argument: str, pair: Any, lhs: Any, rhs: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A pair of dim lists, of lhs and of rhs."""
    try:
        of_lhs, of_rhs = (tuple(p) for p in pair)
    except (TypeError, ValueError):
        raise TypeError(
            wrong(op, argument, shown(pair), "(dims of lhs, dims of rhs)", "Pass two sequences.")
        ) from None
    return dims_of(op, f"{argument}[0]", of_lhs, lhs), dims_of(op, f"{argument}[1]", of_rhs, rhs)


def paired_dims(
    op: str, argument: str, pair: Any, lhs: Any, rhs: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A pair of dim lists that go together: as many of each, with the same sizes."""
    of_lhs, of_rhs = dim_pair(op, argument, pair, lhs, rhs)
    if len(of_lhs) != len(of_rhs):
        raise ValueError(
            wrong(op, argument, shown((of_lhs, of_rhs)), "as many of lhs as of rhs", "Pair them.")
        )
    for i, j in zip(of_lhs, of_rhs, strict=True):
        if lhs.shape[i] != rhs.shape[j]:
            raise ValueError(
                wrong(
                    op,
                    argument,
                    f"{(of_lhs, of_rhs)} of lhs {lhs.shape} and rhs {rhs.shape}",
                    "equal sizes",
                    f"lhs.shape[{i}] is {lhs.shape[i]} and rhs.shape[{j}] is {rhs.shape[j]}.",
                )
            )
    return of_lhs, of_rhs


def out_sharding(
    op: str,
    value: Any,
    out_shape: tuple[int, ...],
    mesh: AbstractMesh,
    argument: str = "out_sharding",
) -> Spec | None:
    """The wanted spec; None where none is asked for or the planner is to choose."""
    if value is None or (isinstance(value, str) and value == "cheapest"):
        return None
    if isinstance(value, NamedSharding):
        if dict(value.mesh.shape) != dict(mesh.shape):
            want = f"one of the operands' mesh {dict(mesh.shape)}"
            raise ValueError(wrong(op, argument, str(value), want, "Pass jax.P(...)."))
        value = value.spec
    if not isinstance(value, PartitionSpec):
        want = 'a PartitionSpec, "cheapest" or None'
        error = ValueError if isinstance(value, str) else TypeError
        raise error(wrong(op, argument, shown(value), want, "Pass jax.P(...)."))
    if value.reduced:
        want = "no reduced axes"
        raise ValueError(wrong(op, argument, str(value), want, "They belong on operands."))
    if value.unreduced and {*mesh.axis_names} - {*mesh.explicit_axes}:
        raise NotImplementedError(
            f"{op}: {argument} is {value}; expected no unreduced axes on a mesh with axes that "
            f"are not Explicit, {mesh}. JAX has unreduced arrays on meshes of Explicit axes alone."
        )
    for axis in sorted(value.unreduced):
        if axis not in mesh.axis_names:
            have = f"unreduced axes of the mesh, {mesh.axis_names}"
            raise ValueError(wrong(op, argument, str(value), have, f"Rename {shown(axis)}."))
    if len(value) > len(out_shape):
        want = f"at most {len(out_shape)} entries, one a dim of the result {out_shape}"
        raise ValueError(wrong(op, argument, str(value), want, "Drop the entries beyond."))
    _distinct_names(op, argument, value)
    spec = to_spec(value, len(out_shape))
    free = {a: n for a, n in mesh.shape.items() if a not in mesh.manual_axes}
    for axis in axes_in(spec):
        if axis not in free:
            have = f"axes of the mesh that are not manual, {tuple(free)}"
            fix = f"Rename {shown(axis)}, or set the mesh with jax.set_mesh."
            raise ValueError(wrong(op, argument, str(value), have, fix))
    for dim, axes in enumerate(spec):
        if out_shape[dim] % shards(axes, free):
            want = f"axes that divide the result {out_shape}"
            fix = f"Dim {dim} has {out_shape[dim]} elements for {shards(axes, free)} devices."
            raise ValueError(wrong(op, argument, str(value), want, fix))
    return spec


def unreduced(op: str, value: Any, after: Sequence[str]) -> tuple[str, ...]:
    """Axes over which an `out_sharding` leaves the sum open: nothing may come after it then."""
    spec = value.spec if isinstance(value, NamedSharding) else value
    if not isinstance(spec, PartitionSpec) or not spec.unreduced:
        return ()
    if after:
        want = f"no unreduced axes with {' and '.join(after)}, which come after the sum"
        fix = "Apply them to the summed result."
        raise ValueError(wrong(op, "out_sharding", str(value), want, fix))
    return tuple(sorted(spec.unreduced))


def open_dims(value: Any) -> frozenset[int]:
    """Dims that an `out_sharding` leaves to the partitioner."""
    if not isinstance(value, PartitionSpec):
        return frozenset()
    return frozenset(
        d for d, entry in enumerate(value.partitions) if entry is PartitionSpec.UNCONSTRAINED
    )


def _distinct_names(op: str, argument: str, value: PartitionSpec) -> None:
    entries = [
        e for e in value.partitions if e is not None and e is not PartitionSpec.UNCONSTRAINED
    ]
    names = [name for e in entries for name in (e if isinstance(e, tuple) else (e,))]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        fix = "Name each mesh axis once, as a string."
        raise ValueError(wrong(op, argument, str(value), "axis names, each once", fix))


def gemm_dims(
    op: str, lhs: Any, rhs: Any, contracting: Any, batch_like: Any
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Checked contracting and batch-like dims."""
    return (
        paired_dims(op, "contracting_dims", contracting, lhs, rhs),
        dim_pair(op, "batch_dims", batch_like, lhs, rhs),
    )


def number(op: str, argument: str, value: Any, fix: str) -> int | float:
    """A number that is static, as Python has it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(wrong(op, argument, f"a {type(value).__name__}", "a Python number", fix))
    return value.item() if isinstance(value, np.generic) else value


def epsilon(op: str, value: Any) -> float:
    """0, or a number that float32 has and is not subnormal there, which devices may take as 0."""
    value = number(op, "epsilon", value, "It is static.")
    numbers = np.finfo(np.float32)
    if value != 0 and not float(numbers.tiny) <= value <= float(numbers.max):
        want = f"0 or a float32 of {numbers.tiny:.4g} to {numbers.max:.4g}"
        raise ValueError(wrong(op, "epsilon", shown(value), want, "Use 1e-6."))
    return float(value)
