"""What `plan_gemm` refuses, with the operand and the dim in the error."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardops.errors import shown, wrong
from shardops.rules.gemm_dims import Dims, GemmDims
from shardops.rules.parts import check_names
from shardops.rules.spec import Sizes, Spec, to_spec

Pair = tuple[Sequence[int], Sequence[int]]


def checked_dims(
    lhs_shape: Sequence[int], rhs_shape: Sequence[int], contracting: Pair, batch_like: Pair
) -> GemmDims:
    """The product of two shapes. Negative dims count from the end."""
    lhs, rhs = tuple(lhs_shape), tuple(rhs_shape)
    for name, shape in (("lhs_shape", lhs), ("rhs_shape", rhs)):
        if any(n < 0 for n in shape):
            raise _refusal(name, shape, "dims of at least 0 elements", "Correct the shape.")
    lhs_k = _dims("contracting_dims[0]", contracting[0], "lhs", lhs)
    rhs_k = _dims("contracting_dims[1]", contracting[1], "rhs", rhs)
    if len(lhs_k) != len(rhs_k):
        want = "as many dims of lhs as of rhs"
        raise _refusal("contracting_dims", (lhs_k, rhs_k), want, "Pair them.")
    for i, j in zip(lhs_k, rhs_k, strict=True):
        if lhs[i] != rhs[j]:
            raise _refusal(
                "contracting_dims",
                f"{(lhs_k, rhs_k)} of lhs {lhs} and rhs {rhs}",
                "equal sizes",
                f"Dim {i} of lhs has {lhs[i]} elements and dim {j} of rhs {rhs[j]}.",
            )
    return GemmDims(
        lhs,
        rhs,
        lhs_k,
        rhs_k,
        lhs_batch_like=_dims("batch_dims[0]", batch_like[0], "lhs", lhs),
        rhs_batch_like=_dims("batch_dims[1]", batch_like[1], "rhs", rhs),
    )


def checked_spec(
    argument: str, spec: Iterable[Any] | None, shape: Sequence[int], sizes: Sizes
) -> Spec:
    """The spec of an array of `shape`, each axis of the mesh on one dim at most."""
    if isinstance(spec, str):
        fix = "Wrap a single axis: PartitionSpec(axis)."
        raise _refusal(argument, shown(spec), "a PartitionSpec, a tuple of entries, or None", fix)
    if isinstance(spec, PartitionSpec):
        if spec.reduced or spec.unreduced:
            fix = "Plans say by themselves what is summed."
            raise _refusal(argument, str(spec), "no reduced or unreduced axes", fix)
        spec = spec.partitions
    entries = tuple(spec or ())
    for dim, entry in enumerate(entries):
        names = entry if isinstance(entry, tuple | list) else (entry,)
        open_dim = entry is None or entry is PartitionSpec.UNCONSTRAINED
        if not open_dim and not all(isinstance(name, str) for name in names):
            want = "None, an axis name, or a tuple of these in each entry"
            raise _refusal(argument, spec, want, f"Entry {dim} is {shown(entry)}.")
    if len(entries) > len(shape):
        want = f"at most {len(shape)} entries, one a dim of {tuple(shape)}"
        raise _refusal(
            argument, f"{shown(spec)} with {len(entries)} entries", want, "Drop the others."
        )
    plain = to_spec(entries, len(shape))
    seen: dict[str, int] = {}
    for dim, entry in enumerate(entries):
        for axis in to_spec((entry,), 1)[0] if not isinstance(entry, tuple) else entry:
            if axis not in sizes:
                want = f"axes of the mesh {tuple(sizes)}"
                raise _refusal(argument, spec, want, f"Rename {shown(axis)} on dim {dim}.")
            if axis in seen:
                fix = f"Axis {shown(axis)} is on dim {seen[axis]} and on dim {dim}: drop one."
                raise _refusal(argument, spec, "each axis once", fix)
            seen[axis] = dim
    return plain


def checked_mesh(sizes: Sizes) -> None:
    """Axis names, each with at least one device."""
    check_names(tuple(sizes.items()))
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            fix = f"Axis {shown(axis)} has {shown(size)} devices."
            raise _refusal("axis_sizes", dict(sizes), "axis name -> devices, at least one", fix)


def checked_blocks(argument: str, block: Sequence[int] | None, shape: Dims) -> Dims | None:
    """As many elements a scale as there are dims, each at least one; None: no blocks."""
    if block is None:
        return None
    if len(block) != len(shape) or any(n < 1 for n in block):
        want = f"a number >= 1 for each dim of {shape}"
        raise _refusal(argument, tuple(block), want, "Use 1 for a dim without blocks.")
    return tuple(block)


def _dims(argument: str, dims: Sequence[int], operand: str, shape: Dims) -> Dims:
    for d in dims:
        if not -len(shape) <= d < len(shape):
            want = f"dims of {operand} of shape {shape}"
            raise _refusal(argument, tuple(dims), want, f"Dim {d} does not exist.")
    found = tuple(d % len(shape) for d in dims)
    if len(set(found)) < len(found):
        raise _refusal(argument, tuple(dims), "each dim once", "Drop the repeated dim.")
    return found


def _refusal(argument: str, got: object, want: str, fix: str) -> ValueError:
    return ValueError(wrong("plan_gemm", argument, got, want, fix))
