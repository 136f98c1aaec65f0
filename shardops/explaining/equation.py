"""One product described in words: an einsum, sizes, and specs. No device is needed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardops.errors import shown, wrong
from shardops.explaining.names import Dims
from shardops.kernels.arguments import MOST, is_beyond, is_count
from shardops.placing import placed
from shardops.primitives.gemm_op import GemmOp
from shardops.recording import Record
from shardops.rules.spec import Sizes, Spec, shards

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(_ITEMSIZES)


@dataclass(frozen=True)
class Equation:
    """`b s k, k n -> b s n`: names of the dims of both operands and of the result."""

    lhs: Dims
    rhs: Dims
    out: Dims

    @cached_property
    def batch(self) -> Dims:
        """Dims of both operands and the result: one product for each element."""
        return tuple(d for d in self.lhs if d in self.rhs and d in self.out)

    @cached_property
    def contracting(self) -> Dims:
        return tuple(d for d in self.lhs if d in self.rhs and d not in self.out)

    @cached_property
    def computed(self) -> Dims:
        """The result's dims as the product gives them: batch, lhs free, rhs free."""
        free = [d for d in (*self.lhs, *self.rhs) if not (d in self.lhs and d in self.rhs)]
        return (*self.batch, *free)


def parse(text: str) -> Equation:
    """An equation of two operands. Dims are words, or letters where no space separates them.

    Raises: ValueError for anything but `dims, dims -> dims`, for a dim twice on one side, for one
      that only one operand has and the result does not, and for one that only the result has.
    """
    sides = text.split("->")
    operands = sides[0].split(",")
    if len(sides) != 2 or len(operands) != 2:
        raise _refusal("the einsum", shown(text), "'dims, dims -> dims'", "Try 'm k, k n -> m n'.")
    terms = [*operands, sides[1]]
    words = any(len(t.split()) > 1 for t in terms)
    lhs, rhs, out = (tuple(t.split() if words else t.strip()) for t in terms)
    for name, dims in (("lhs", lhs), ("rhs", rhs), ("out", out)):
        for d in dims:
            if not re.fullmatch(r"\w+", d):
                fix = f"Dim {shown(d)} of {name} is no name."
                raise _refusal("the einsum", shown(text), "dims that are names", fix)
            if dims.count(d) > 1:
                fix = f"Dim {shown(d)} is twice in {name}."
                raise _refusal("the einsum", shown(text), "each dim once in an operand", fix)
    for d in out:
        if d not in lhs and d not in rhs:
            fix = f"Dim {shown(d)} of out is in neither lhs nor rhs."
            raise _refusal("the einsum", shown(text), "dims of the operands in the result", fix)
    for name, dims, other in (("lhs", lhs, rhs), ("rhs", rhs, lhs)):
        for d in dims:
            if d not in other and d not in out:
                fix = f"Dim {shown(d)} is in {name} only, which would be a sum of it: sum it first."
                raise _refusal("the einsum", shown(text), "a product of two operands", fix)
    return Equation(lhs, rhs, out)


def sizes_of(argument: str, text: str) -> dict[str, int]:
    """`b=8,s=512` as a dict. Raises ValueError for other text, and for two sizes of one name."""
    found: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = (p.strip() for p in part.partition("="))
        if not (name and is_count(number)):
            raise _refusal(argument, shown(text), "name=size pairs", f"{shown(part)} is none.")
        if is_beyond(number):
            fix = f"{shown(part)} is more."
            raise _refusal(argument, shown(text), f"sizes of at most 2^40 = {MOST}", fix)
        if found.get(name, int(number)) != int(number):
            twice = f"{shown(name)} is given {found[name]} and {number}"
            fix = f"{twice}: dims of one name are of one size."
            raise _refusal(argument, shown(text), "one size a name", fix)
        found[name] = int(number)
    return found


def spec_of(argument: str, text: str, dims: Dims, mesh: Sizes) -> Spec:
    """`dp,,tp` as a spec: an entry a dim, axes of one entry joined by +; "" is whole.

    Raises: ValueError where the entries are not as many as `dims`, an axis is not in the mesh, or
      is named twice.
    """
    entries = [e.strip() for e in text.split(",")] if text.strip() else [""] * len(dims)
    if len(entries) != len(dims):
        has = f"{shown(text)}, {len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
        fix = "An entry may be empty: 'dp,,tp'."
        raise _refusal(argument, has, f"{len(dims)}, one for each of {' '.join(dims)}", fix)
    spec = tuple(tuple(a.strip() for a in e.split("+")) if e else () for e in entries)
    where: dict[str, str] = {}
    for dim, axes in zip(dims, spec, strict=True):
        for axis in axes:
            if axis not in mesh:
                fix = f"{shown(axis)} on dim {dim} is none of them."
                raise _refusal(argument, shown(text), f"axes of the mesh {', '.join(mesh)}", fix)
            if axis in where:
                fix = f"{shown(axis)} is on dim {where[axis]} and on dim {dim}: drop one."
                raise _refusal(argument, shown(text), "each mesh axis once", fix)
            where[axis] = dim
    return spec


def record_of(
    equation: Equation,
    shape: Mapping[str, int],
    mesh: Mapping[str, int],
    specs: tuple[str, str, str | None],
    *,
    dtype: str = "bfloat16",
    batch_like: Sequence[str] = (),
) -> Record:
    """The product, placed on a mesh that need not exist.

    Args:
      equation: of the operands' dims.
      shape: the size of each dim.
      mesh: the size of each mesh axis.
      specs: of lhs, rhs and the result, as text; "cheapest" or None as the last one.
      dtype: of operands and result.
      batch_like: dims that are batch-like, as `batch_dims` of `shardops.gemm`.
    Raises: ValueError naming the operand and the dim.
    """
    lhs, rhs = equation.lhs, equation.rhs
    _check_shape(equation, shape)
    if dtype not in _ITEMSIZES:
        raise _refusal("--dtype", shown(dtype), " | ".join(DTYPES), "Choose one of these.")
    for d in batch_like:
        if d not in (*lhs, *rhs):
            fix = f"{shown(d)} is none of them."
            raise _refusal(
                "--batch-dims", shown(d), f"dims of {' '.join(lhs)} or {' '.join(rhs)}", fix
            )
    offered = spec_of("--lhs", specs[0], lhs, mesh), spec_of("--rhs", specs[1], rhs, mesh)
    wanted = _wanted(equation, shape, mesh, specs[2])
    op = GemmOp(
        name="gemm",
        contracting=(_at(equation.contracting, lhs), _at(equation.contracting, rhs)),
        batch=(_at(equation.batch, lhs), _at(equation.batch, rhs)),
        batch_like=(_at(batch_like, lhs), _at(batch_like, rhs)),
        out_dtype=dtype,
        cheapest=specs[2] == "cheapest",
    )
    shapes = tuple(shape[d] for d in lhs), tuple(shape[d] for d in rhs)
    sizes = tuple(mesh.items())
    placement = placed(op, shapes, offered, sizes, (wanted,), (_ITEMSIZES[dtype],) * 2)
    return Record(
        op=op,
        route="planned",
        shapes=shapes,
        dtypes=(dtype, dtype),
        offered=offered,
        wanted=(wanted,),
        sizes=sizes,
        placement=placement,
    )


def _check_shape(equation: Equation, shape: Mapping[str, int]) -> None:
    dims = dict.fromkeys((*equation.lhs, *equation.rhs))
    for operand, named in (("lhs", equation.lhs), ("rhs", equation.rhs)):
        for d in named:
            if d not in shape:
                fix = f"Add {d}=<size>, which {operand} has."
                raise _refusal("--shape", f"without {shown(d)}", f"sizes of {', '.join(dims)}", fix)
    for d in shape:
        if d not in dims:
            fix = f"Drop {shown(d)}, or name it in the einsum."
            raise _refusal("--shape", f"with {shown(d)}", f"sizes of {', '.join(dims)}", fix)


def _wanted(
    equation: Equation, shape: Mapping[str, int], mesh: Sizes, text: str | None
) -> Spec | None:
    """The spec wanted of the result, its dims in the order that the product gives them."""
    if text is None or text == "cheapest":
        return None
    given = spec_of("--out", text, equation.out, mesh)
    for d, axes in zip(equation.out, given, strict=True):
        if shape[d] % shards(axes, mesh):
            fix = f"Dim {d} of out has {shape[d]} elements for {shards(axes, mesh)} devices."
            raise _refusal("--out", shown(text), "axes that divide the result", fix)
    by_name = dict(zip(equation.out, given, strict=True))
    return tuple(by_name[d] for d in equation.computed)


def _at(names: Sequence[str], dims: Dims) -> tuple[int, ...]:
    """Where those of `names` stand that an operand has."""
    return tuple(dims.index(d) for d in names if d in dims)


def _refusal(argument: str, got: str, want: str, fix: str) -> ValueError:
    return ValueError(wrong("explain", argument, got, want, fix))
