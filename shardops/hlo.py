"""Read the collectives out of a compiled program.

    collectives(jax.jit(f).lower(x).compile())  ->  (Collective(kind="all-reduce", ...), ...)

A test that counts collectives, and a table that a user reads, both want the numbers of the program
that runs, after the partitioner and the combiners: that is the compiled HLO text and nothing before
it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, get_args

from shardops import _hlo_text as hlo_text

__all__ = ["Collective", "Kind", "asked_by", "collectives", "received_bytes", "summary"]

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
]

_SCOPE = re.compile(r"shardops\.(\w+)(\.grad)?")
_COMBINED = re.compile(r"(?:.*?/)?\((.*:.*)\)")  # jit(step)/(one/psum:another/psum)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a per-device program.

    Attributes:
      kind: the opcode, without the -start of an asynchronous pair.
      bytes: of the result on one device, summed over the arrays of a combined collective. So an
        all-gather counts the gathered array and a reduce-scatter the scattered piece.
      dtype: HLO name ("f32", "bf16", "f8e4m3fn") of the largest array.
      shape: of the largest array of the result on one device.
      groups: how many devices take part in one group; 2 for a collective-permute (a sender and a
        receiver), 0 where the text does not say.
      op_name: where in the user's program it comes from, as JAX wrote it. XLA leaves it out of, or
        writes only an argument's name into, some resharding collectives: then that of the nearest
        instruction that uses the result, or else of the nearest that makes the operand.
      arrays: how many arrays it moves; more than one where XLA combined several collectives.
    """

    kind: Kind
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    groups: int
    op_name: str
    arrays: int = 1


def collectives(compiled_or_text: Any) -> tuple[Collective, ...]:
    """List the collectives of a compiled program, in the order of its text.

    An asynchronous pair counts once; a combined (tuple-shaped) collective counts once, with the
    bytes of all its arrays. An instruction in a loop body counts once, however often the loop runs.

    Args:
      compiled_or_text: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.
    Raises: TypeError for another object, ValueError for a program that is not compiled yet.
    """
    text = _text(compiled_or_text)
    instructions = hlo_text.parse(text)
    done = hlo_text.done_types(instructions.values())
    world = hlo_text.world_size(text)
    origin = _origin(instructions)
    found = []
    for one in instructions.values():
        kind = one.opcode.removesuffix("-start")
        if kind not in get_args(Kind):
            continue
        arrays = hlo_text.arrays(done.get(one.name) or hlo_text.result_type(one))
        largest = max(arrays, key=lambda a: a.bytes)
        found.append(
            Collective(
                kind=cast(Kind, kind),
                bytes=sum(a.bytes for a in arrays),
                dtype=largest.dtype,
                shape=largest.shape,
                groups=hlo_text.group_size(one, world),
                op_name=origin(one),
                arrays=len(arrays),
            )
        )
    return tuple(found)


def received_bytes(collective: Collective) -> float:
    """Bytes that one device receives in a collective, under ring algorithms.

    With n devices a group: all-gather (n-1)/n of the result; reduce-scatter (n-1) times the result,
    which is (n-1)/n of the operand; all-reduce twice that of its operand; all-to-all (n-1)/n;
    a permute or broadcast all of it.

    Args:
      collective: one that `collectives` lists.
    """
    n, size = max(collective.groups, 1), collective.bytes
    match collective.kind:
        case "all-gather" | "all-to-all" | "ragged-all-to-all":
            return size * (n - 1) / n
        case "reduce-scatter":
            return float(size * (n - 1))
        case "all-reduce":
            return 2 * size * (n - 1) / n
    return float(size)


def summary(compiled_or_text: Any) -> dict[str, tuple[int, int]]:
    """Count the collectives of a compiled program: {kind: (count, bytes)}.

    Takes what `collectives` takes, or the collectives themselves.
    """
    given = compiled_or_text
    ready = isinstance(given, (tuple, list)) and all(isinstance(c, Collective) for c in given)
    out: dict[str, tuple[int, int]] = {}
    for c in cast("Iterable[Collective]", given) if ready else collectives(given):
        count, size = out.get(c.kind, (0, 0))
        out[c.kind] = (count + 1, size + c.bytes)
    return out


def asked_by(collective: Collective) -> str:
    """Name the op that a collective is there for.

    "shardops.gemm" where the innermost scope is one of shardops' ops, "shardops.gemm.grad" in its
    gradient; else the JAX primitive ("psum", "dot_general"), or "unknown" where XLA kept no name.
    Where XLA combined the collectives of several ops, all of them: "psum, shardops.gemm.grad".
    """
    combined = _COMBINED.fullmatch(collective.op_name)
    names = combined[1].split(":") if combined else [collective.op_name]
    return ", ".join(sorted({_op(name) for name in names}))


def _op(name: str) -> str:
    scopes = list(_SCOPE.finditer(name))
    if scopes:
        last = scopes[-1]
        backward = last[2] or "transpose(" in name[: last.start()]
        return f"shardops.{last[1]}" + (".grad" if backward else "")
    return name.rsplit("/", 1)[-1] or "unknown"


def _text(given: Any) -> str:
    if hasattr(given, "as_text"):
        given = given.as_text()
    if not isinstance(given, str):
        raise TypeError(
            f"collectives: compiled_or_text has type {type(given).__name__}; expected a compiled "
            "program or its text. Pass jax.jit(f).lower(...).compile()."
        )
    if "stablehlo." in given or given.lstrip().startswith("module @"):
        raise ValueError(
            "collectives: compiled_or_text is StableHLO; expected compiled HLO, since collectives "
            "exist only after partitioning. Call .compile() on what .lower() returned."
        )
    return given


def _origin(
    instructions: dict[str, hlo_text.Instruction],
) -> Callable[[hlo_text.Instruction], str]:
    """A function from a collective to the op_name that says best why it is there."""
    callers: dict[str, list[str]] = {}
    users: dict[str, list[str]] = {}
    for one in instructions.values():
        if one.calls:
            callers.setdefault(one.calls, []).append(one.name)
        for operand in one.operands:
            users.setdefault(operand, []).append(one.name)
    for one in instructions.values():
        if one.root:  # what a computation returns is used by whoever called it
            users.setdefault(one.name, []).extend(callers.get(one.computation, ()))

    def nearest(start: str, step: Callable[[str], Iterable[str]], other_than: str = "") -> str:
        seen, edge = {start}, [start]
        while edge:
            edge = [n for name in edge for n in step(name) if n in instructions and n not in seen]
            seen.update(edge)
            for name in edge:
                if "/" in instructions[name].op_name and instructions[name].op_name != other_than:
                    return instructions[name].op_name
        return ""

    def consumer(one: hlo_text.Instruction) -> str:
        return nearest(one.name, lambda name: users.get(name, ()), other_than=one.op_name)

    def origin(one: hlo_text.Instruction) -> str:
        # The partitioner names an all-gather after the op whose result it gathers, or after the
        # reshard without its scope (JAX 0.11 on); it is there for the op that uses it.
        if one.opcode.startswith("all-gather") and one.partitioner and "/" in one.op_name:
            return consumer(one) or one.op_name
        if "/" in one.op_name:  # a name without a path is that of an argument
            return one.op_name
        forward = nearest(one.name, lambda name: users.get(name, ()))
        return forward or nearest(one.name, lambda name: instructions[name].operands) or one.op_name

    return origin
