"""What one device receives, and computes, in a compiled program: read from its HLO."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from shardops import _hlo_text as hlo_text
from shardops import hlo

# What passes an array on as it is.
_SAME = {"bitcast", "copy", "reshape", "transpose", "get-tuple-element", "all-reduce-done"}


def received(compiled: Any) -> float:
    """Bytes that one device receives in a program."""
    return sum(map(hlo.received_bytes, hlo.collectives(compiled)))


def received_at_best(compiled: Any) -> float:
    """As `received`, where an all-reduce of which a device uses a slice alone, cut by its place in
    the mesh, counts as the reduce-scatter that some compilers would make of it."""
    instructions = hlo_text.parse(_text(compiled))
    kinds = get_args(hlo.Kind)
    ones = [one for one in instructions.values() if one.opcode.removesuffix("-start") in kinds]
    total = 0.0
    for one, collective in zip(ones, hlo.collectives(compiled), strict=True):
        if collective.kind == "all-reduce":
            total += _scattered(collective, _cut(one, instructions))
        else:
            total += hlo.received_bytes(collective)
    return total


def flops(compiled: Any) -> float:
    """Floating-point operations of the products in a program, on one device."""
    instructions = hlo_text.parse(_text(compiled))
    total = 0
    for one in instructions.values():
        if one.opcode == "dot":
            [out], [lhs] = (hlo_text.arrays(i.type) for i in (one, instructions[one.operands[0]]))
            dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
            contracted = [int(d) for d in dims[1].split(",") if d] if dims else []
            total += 2 * math.prod(out.shape) * math.prod(lhs.shape[d] for d in contracted)
    return total


def _text(compiled: Any) -> str:
    return compiled if isinstance(compiled, str) else compiled.as_text()


def _scattered(collective: hlo.Collective, cut: int) -> float:
    """Bytes of an all-reduce whose result is cut into `cut` parts of which one is used."""
    n = collective.groups
    cut = min(cut, n)
    if n % cut:
        return hlo.received_bytes(collective)
    piece, rest = collective.bytes / cut, n // cut
    return piece * (cut - 1) + 2 * piece * (rest - 1) / rest


def _cut(one: hlo_text.Instruction, instructions: Mapping[str, hlo_text.Instruction]) -> int:
    """Into how many parts the result of `one` is cut, where all its uses are such cuts; else 1."""
    whole = hlo_text.arrays(one.type)
    slices = list(_slices(one.name, instructions))
    if len(whole) != 1 or not slices or None in slices:
        return 1
    return min(whole[0].bytes // size for size in slices if size)


def _slices(name: str, instructions: Mapping[str, hlo_text.Instruction]) -> Iterator[int | None]:
    """Bytes of each dynamic slice of an array; None for a use that takes it whole."""
    users = [one for one in instructions.values() if name in one.operands]
    if not users:
        yield None  # the result of the program
    for user in users:
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            yield hlo_text.arrays(user.type)[0].bytes
        elif user.opcode in _SAME:
            yield from _slices(user.name, instructions)
        elif user.opcode == "fusion" and user.calls:
            at = [str(i) for i, operand in enumerate(user.operands) if operand == name]
            for inner in _parameters(user.calls, at, instructions.values()):
                yield from _slices(inner, instructions)
        else:
            yield None


def _parameters(
    computation: str, at: Iterable[str], instructions: Iterable[hlo_text.Instruction]
) -> list[str]:
    return [
        one.name
        for one in instructions
        if one.computation == computation and one.opcode == "parameter" and one.operands[0] in at
    ]
