"""The little of HLO's text syntax that `shardops.hlo` needs.

Relied on: one instruction a line, `%name = type opcode(operands), attributes`, inside computations
that open with `%name (...) -> type {`. Everything else in a line is skipped.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_HEAD = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=\s?]*)\](\{[^}]*\})?")

# bits of an element whose name does not say them
_NAMED_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    op_name: str
    computation: str
    root: bool
    partitioner: bool  # put there by the partitioner, so that its op_name is another op's

    @property
    def calls(self) -> str | None:
        """The computation that an async-start or a fusion runs."""
        found = _CALLS.search(self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def parse(text: str) -> dict[str, Instruction]:
    """Every instruction of a module by its name, in the order of the text."""
    out: dict[str, Instruction] = {}
    computation = ""
    for line in text.splitlines():
        opens = _COMPUTATION.match(line)
        if opens and " = " not in line.partition("(")[0]:
            computation = opens[1]
            continue
        one = _instruction(line, computation)
        if one is not None:
            out[one.name] = one
    return out


def _instruction(line: str, computation: str) -> Instruction | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    operands = line[opcode.end() : close - 1]
    names = _OPERAND.findall(operands)
    if not names:  # text printed without the % sign
        names = [part.split()[-1] for part in operands.split(",") if part.split()]
    op_name = _OP_NAME.search(line, close)
    return Instruction(
        name=head[2],
        type=line[start:end],
        opcode=opcode[1],
        operands=tuple(names),
        attributes=line[close:],
        op_name=op_name[1] if op_name else "",
        computation=computation,
        root=head[1] is not None,
        partitioner='is_spmd_generated="true"' in line[close:],
    )


def _closing(line: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        if depth == 0:
            return at + 1
    return len(line)


def done_types(instructions: Iterable[Instruction]) -> dict[str, str]:
    """{name of a -start: type of its -done}: the one place where the result stands alone."""
    began: dict[str, str] = {}  # an -update passes on what the -start before it began
    out: dict[str, str] = {}
    for one in instructions:
        if not one.operands:
            continue
        start = began.get(one.operands[-1], one.operands[-1])
        if one.opcode.endswith("-update"):
            began[one.name] = start
        elif one.opcode.endswith("-done"):
            out[start] = one.type
    return out


def result_type(one: Instruction) -> str:
    """The result's part of an instruction's type.

    A -start has the type (operands, results, contexts...), except for all-reduce-start, which has
    that of the result.
    """
    if not one.opcode.endswith("-start") or one.opcode == "all-reduce-start":
        return one.type
    members = _members(one.type)
    return members[1] if len(members) > 1 else one.type


def _members(type_: str) -> list[str]:
    """The members of a tuple type."""
    if not type_.startswith("("):
        return [type_]
    parts, depth, begin = [], 0, 1
    for at, char in enumerate(type_):
        depth += {"(": 1, ")": -1, "{": 1, "}": -1, "[": 1, "]": -1}.get(char, 0)
        if (char == "," and depth == 1) or depth == 0:
            parts.append(type_[begin:at].strip())
            begin = at + 1
    return parts


def arrays(type_: str) -> list[Array]:
    """The arrays in a type, tuples flattened."""
    out = []
    for dtype, dims, layout in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", type_)):
        shape = tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip(" <=?"))
        bits = math.prod(shape) * _bits(dtype, layout)
        out.append(Array(dtype, shape, -(-bits // 8)))
    return out


def _bits(dtype: str, layout: str) -> int:
    packed = re.search(r"E\((\d+)\)", layout)  # types under a byte are packed where this says so
    if packed:
        return int(packed[1])
    if dtype in _NAMED_BITS:
        return _NAMED_BITS[dtype]
    number = re.match(r"[a-z]+(\d+)", dtype)
    if number is None:
        raise ValueError(
            f"collectives: element type is {dtype!r}; expected one whose name says its bits. "
            "Please report the program."
        )
    return max(8, int(number[1]))


def group_size(one: Instruction, world: int) -> int:
    """Devices in one group, from any of the ways in which XLA writes replica_groups."""
    if one.opcode.startswith("collective-permute"):
        return 2
    text = one.attributes.partition("replica_groups=")[2]
    if not text or text.startswith("{}"):
        return world
    if listed := re.match(r"\{\s*\{([\d,\s]*)\}", text):
        return len([i for i in listed[1].split(",") if i.strip()])
    if iota := re.match(r"\[\d+,(\d+)\]<=", text):
        return int(iota[1])
    if mesh := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])  # 'a', or a part of it: 'a':(1)2
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    return 0


def world_size(text: str) -> int:
    """All devices of the program, 0 where the text does not say: an empty replica_groups."""
    header = text.partition("\n")[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(map(int, counts)) if counts else 0
