"""Small changes of one spec that would save bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp

from shardops.explaining import wording
from shardops.explaining.names import Names
from shardops.explaining.steps import all_steps
from shardops.placing import placed
from shardops.primitives.gemm_op import GemmOp
from shardops.recording import Record
from shardops.rules.spec import Spec, shards
from shardops.rules.step import Step

WORTH = 0.1  # of the bytes of an op


@dataclass(frozen=True)
class Suggestion:
    """A change of one spec, and what the op would move with it."""

    array: str
    before: Spec
    after: Spec
    bytes: float
    saved: float  # part of the bytes now
    text: str


@dataclass(frozen=True)
class _Change:
    """One mesh axis of the array number `at` (the result comes last) goes from a dim to another."""

    at: int
    axis: str
    start: int | None
    end: int | None
    after: Spec

    @property
    def spread(self) -> int:
        """Changes that keep more copies of an array are the last resort."""
        return 1 if self.end is None else 0


def suggestion(record: Record, names: Names) -> Suggestion | None:
    """The change that saves most, of those that save more than 10 % of the op's bytes.

    No more FLOPs a device. A change that spreads an array over fewer devices, and so takes memory,
    is named only where no other one helps. None for ops that are no products.
    """
    op = record.op
    if not isinstance(op, GemmOp):
        return None
    now = moved(record)
    best: tuple[tuple[float, ...], _Change, Record] | None = None
    for change in _changes(record, names):
        changed = _replanned(record, op, change)
        if moved(changed) >= (1 - WORTH) * now:
            continue
        if _flops(changed) > _flops(record) * (1 + 1e-9):
            continue
        kept = changed.placement.results == record.placement.results
        rank = (change.spread, moved(changed), len(_collectives(changed)), not kept, change.at == 2)
        if best is None or rank < best[0]:
            best = rank, change, changed
    if best is None:
        return None
    _, change, changed = best
    array = (*names.operands[:2], names.results[0])[change.at]
    return Suggestion(
        array.name,
        _specs(record)[change.at],
        change.after,
        moved(changed),
        1 - moved(changed) / now,
        _in_words(record, names, change, changed),
    )


def moved(record: Record) -> float:
    """Bytes that a device receives for an op."""
    return sum(s.bytes for s in all_steps(record))


def _flops(record: Record) -> float:
    return getattr(record.placement.plan, "flops", 0.0)


def _collectives(record: Record) -> list[Step]:
    return [s for s in all_steps(record) if s.collective]


def _specs(record: Record) -> tuple[Spec, Spec, Spec]:
    """Of lhs, rhs and the result: as it is wanted, else as it is."""
    result = next((w for w in record.wanted if w is not None), record.placement.results[0])
    return record.offered[0], record.offered[1], result


def _changes(record: Record, names: Names) -> Iterator[_Change]:
    shapes = (*record.shapes[:2], _out_shape(record, names))
    sizes = dict(record.sizes)
    for at, (spec, shape) in enumerate(zip(_specs(record), shapes, strict=True)):
        for axis, count in record.sizes:
            if count == 1:
                continue
            start = next((d for d, s in enumerate(spec) if axis in s), None)
            without = tuple(tuple(a for a in s if a != axis) for s in spec)
            if start is not None:
                yield _Change(at, axis, start, None, without)
            for end, length in enumerate(shape):
                cut = (*without[end], axis)
                if end != start and length % shards(cut, sizes) == 0:
                    after = (*without[:end], cut, *without[end + 1 :])
                    yield _Change(at, axis, start, end, after)


def _out_shape(record: Record, names: Names) -> tuple[int, ...]:
    pairs = zip(names.operands, record.shapes, strict=True)
    length = {d: n for a, shape in pairs for d, n in zip(a.dims, shape, strict=True)}
    return tuple(length[d] for d in names.results[0].dims)


def _replanned(record: Record, op: GemmOp, change: _Change) -> Record:
    offered, wanted = list(record.offered), record.wanted
    if change.at < 2:
        offered[change.at] = change.after
    else:
        wanted = (change.after,) * max(1, len(wanted))
    itemsizes = tuple(jnp.dtype(d).itemsize for d in record.dtypes)
    placement = placed(op, record.shapes, tuple(offered), record.sizes, wanted, itemsizes)
    return replace(record, offered=tuple(offered), wanted=wanted, placement=placement)


def _in_words(record: Record, names: Names, change: _Change, changed: Record) -> str:
    array = (*names.operands[:2], names.results[0])[change.at]
    axis, possessive = change.axis, f"{array.name}'s"
    if change.at == 2:
        text = _wished(array.dims, change)
    elif change.end is None:
        text = f"not sharding {possessive} {array.dims[change.start or 0]} over {axis}"
    else:
        text = f"sharding {possessive} {array.dims[change.end]} over {axis}"
        if change.start is not None:
            text += f" instead of {array.dims[change.start]}"
    text += f" {_gain(record, changed)}: {wording.size(moved(changed))} instead of "
    text += wording.size(moved(record))
    if change.end is None and change.start is not None:
        text += f", at {dict(record.sizes)[axis]} × the memory for {array.name}"
    elif change.at < 2 and changed.placement.results != record.placement.results:
        result, spec = names.results[0], changed.placement.results[0]
        text += f"; {result.name} is then {wording.layout(result.dims, spec)}"
    return text


def _wished(dims: tuple[str, ...], change: _Change) -> str:
    if change.end is None:
        return f"wanting the result whole over {change.axis}"
    text = f"wanting the result's {dims[change.end]} over {change.axis}"
    return text if change.start is None else f"{text} instead of {dims[change.start]}"


def _gain(before: Record, after: Record) -> str:
    """saves the all-reduce; … at the price of an all-gather; moves less."""
    had = [wording.COLLECTIVES[s.kind] for s in _collectives(before)]
    has = [wording.COLLECTIVES[s.kind] for s in _collectives(after)]
    lost = [k for k in dict.fromkeys(had) if k not in has]
    new = [k for k in dict.fromkeys(has) if k not in had]
    if not lost:
        return "moves less"
    gone = "the " + wording.listed(lost)
    if new and not (len(has) < len(had)):
        return f"saves {gone} at the price of {_a(wording.listed(new))}"
    return f"saves {gone}"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
