"""Why a product moves what it moves, in one sentence: facts about the specs, then what follows."""

from dataclasses import dataclass
from functools import cached_property

from shardops.explaining import wording
from shardops.explaining.names import Array, Names
from shardops.explaining.steps import uneven_gathers
from shardops.primitives.gemm_op import GemmOp
from shardops.recording import Record
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.spec import Axes, Spec, axes_in, shards
from shardops.rules.step import Step

_SIDES = ("lhs", "rhs")


@dataclass(frozen=True)
class _Operand:
    """One side of the product, as it was offered."""

    array: Array
    shape: tuple[int, ...]
    spec: Spec
    contracting: tuple[int, ...]
    batch: tuple[int, ...]

    def holding(self, axes: Axes) -> int | None:
        """The dim that any of `axes` shards."""
        return next((d for d, s in enumerate(self.spec) if {*s} & {*axes}), None)


class GemmReason:
    """The clauses of one product's sentence."""

    def __init__(self, record: Record, op: GemmOp, names: Names):
        self.record, self.op, self.names = record, op, names
        self.dims: GemmDims = op.dims(record.shapes)
        self.sizes = dict(record.sizes)
        self.wanted = next((w for w in record.wanted if w is not None), None)
        sides = ((self.dims.lhs_k, self.dims.lhs_batch), (self.dims.rhs_k, self.dims.rhs_batch))
        self.operands = [
            _Operand(names.operands[n], record.shapes[n], record.offered[n], *sides[n])
            for n in (0, 1)
        ]

    def __str__(self) -> str:
        moves = (*uneven_gathers(self.record), *self.record.placement.moves)
        steps = self.record.placement.steps
        sums = [s for s in steps if s.sums]
        clauses = [self._move(s) for s in moves]
        if sums:
            clauses.append(self._sum(sums))
        clauses += [self._result(s) for s in steps if s not in sums]
        if not clauses:
            clauses.append(self._nothing())
        elif not any(s.collective for s in (*moves, *steps)):
            clauses.append("nothing moves")
        return "; ".join(dict.fromkeys(clauses)) + "."

    @cached_property
    def _before(self) -> tuple[Spec, Spec]:
        """Where lhs and rhs lie when the local product begins."""
        return self.record.placement.operands[0], self.record.placement.operands[1]

    # ---- what happens to the operands ----------------------------------------------------------

    def _move(self, step: Step) -> str:
        if step.array not in _SIDES:
            return self._follows(step)
        at = _SIDES.index(step.array)
        own, other = self.operands[at], self.operands[1 - at]
        name, axes = own.array.name, wording.axes(step.axes)
        if step.kind == "ppermute":
            now = wording.layout(own.array.dims, step.before)
            then = wording.layout(own.array.dims, step.after)
            return f"{name} is wanted as {then}, not {now}: its blocks change places"
        dim = own.array.dims[step.dim]
        if step.kind == "slice":
            return f"{name} is cut over {axes} along {dim}{self._cut_for(own, other, step)}"
        if step.kind == "all_to_all":
            to = own.array.dims[step.to_dim]
            why = self._sharded_there(own, other, step)
            move = wording.verb(step.axes, "move")
            return f"{axes} {move} from {dim} to {to} of {name}{why}: all-to-all"
        return self._gather(own, other, step)

    def _gather(self, own: _Operand, other: _Operand, step: Step) -> str:
        name, axes, dim = own.array.name, wording.axes(step.axes), own.array.dims[step.dim]
        gathered = f"{name} is gathered over {axes}"
        length = own.shape[step.dim]
        if length % shards(own.spec[step.dim], self.sizes):
            parts = shards(own.spec[step.dim], self.sizes)
            return f"{dim} of {name} has {length} elements, not a multiple of {parts}: {gathered}"
        if step.dim in own.contracting:
            return self._gather_contracting(own, other, step, gathered)
        held = other.holding(step.axes)
        if held is not None:
            shard = wording.verb(step.axes, "shard")
            there = f"{axes} {shard} {dim} of {name} and {other.array.dims[held]} of"
            if held in other.contracting:
                return f"{there} {other.array.name}, so cannot shard both: {gathered}"
            return f"{there} {other.array.name}, but one dim of the result only: {gathered}"
        if self.wanted is not None and not {*step.axes} <= {*axes_in(self.wanted)}:
            return (
                f"the result is not wanted sharded over {axes}: {gathered} before the product, "
                "which moves no more than the result would"
            )
        return (
            f"{dim} of {name} is sharded over {axes}, which the product uses elsewhere: {gathered}"
        )

    def _gather_contracting(self, own: _Operand, other: _Operand, step: Step, gathered: str) -> str:
        name, axes, dim = own.array.name, wording.axes(step.axes), own.array.dims[step.dim]
        pair = other.contracting[own.contracting.index(step.dim)]
        held = other.holding(step.axes)
        if held is None:
            return (
                f"{dim} is sharded over {axes} on {name} only: {gathered}, which costs no "
                f"more than to cut {other.array.name} and sum the result"
            )
        if held != pair:
            there = f"{other.array.dims[held]} of {other.array.name}"
            shard = wording.verb(step.axes, "shard")
            return f"{axes} {shard} {dim} of {name} but {there}: {gathered}"
        if own.spec[step.dim] == other.spec[pair]:
            return f"{dim} is sharded over {axes} on both, but to sum costs more: {gathered}"
        have, want = wording.axes(own.spec[step.dim]), wording.axes(other.spec[pair])
        return (
            f"{dim} is sharded over {have} on {name} but {want} on {other.array.name}: {gathered}"
        )

    def _cut_for(self, own: _Operand, other: _Operand, step: Step) -> str:
        for mine, theirs in ((own.contracting, other.contracting), (own.batch, other.batch)):
            if step.dim in mine:
                pair = theirs[mine.index(step.dim)]
                if {*step.axes} <= {*other.spec[pair]}:
                    return f" to match {other.array.name}"
                return f", as is {other.array.name}"
        return ", where the result is wanted" if self.wanted else ""

    def _sharded_there(self, own: _Operand, other: _Operand, step: Step) -> str:
        if step.to_dim in own.contracting:
            pair = other.contracting[own.contracting.index(step.to_dim)]
            if {*step.axes} & {*other.spec[pair]}:
                return f", where {other.array.name} is sharded"
        elif self.wanted and {*step.axes} & {*axes_in(self.wanted)}:
            return ", where the result is wanted"
        return f", which moves less than to gather {own.array.name}"

    def _follows(self, step: Step) -> str:
        name = self.names.called(step.array).name
        return f"{name} goes where the result is: {wording.COLLECTIVES[step.kind]}"

    # ---- what happens to the result ------------------------------------------------------------

    def _sum(self, sums: list[Step]) -> str:
        summed = axes_in(s.axes for s in sums)
        lhs, rhs = self.operands
        dims = [i for i in self.dims.lhs_k if {*self._before[0][i]} & {*summed}]
        which = wording.listed([lhs.array.dims[i] for i in dims]) or "the contracting dims"
        pairs = [(i, self.dims.rhs_k[self.dims.lhs_k.index(i)]) for i in dims]
        offered = all(lhs.spec[i] == rhs.spec[j] == self._before[0][i] for i, j in pairs)
        then = "" if offered else "then "
        verb = "are" if len(dims) > 1 else "is"
        text = f"{which} {verb} {then}sharded over {wording.axes(summed)} on both: partial sums"
        return "; ".join([text, *(self._one_sum(s) for s in sums)])

    def _one_sum(self, step: Step) -> str:
        axes = wording.axes(step.axes)
        if step.kind == "psum":
            if self.wanted is None:
                return "no sharding is asked of the result, so all-reduce"
            return f"result wanted whole over {axes}, so all-reduce"
        dim = self.names.results[0].dims[step.dim]
        there = f"{dim}@{wording.axes(step.after[step.dim])}"
        if self.wanted is not None and {*step.axes} <= {*self.wanted[step.dim]}:
            return f"result wanted {there}, so reduce-scatter"
        if self.wanted is None:
            return f"the result may stay {there}, so reduce-scatter"
        return f"reduce-scatter along {dim}, which leaves less to move on"

    def _result(self, step: Step) -> str:
        axes, result = wording.axes(step.axes), self.names.results[0]
        if step.array != "out":
            return self._follows(step)
        dim = wording.dim_name(result, step.dim)
        if step.kind == "ppermute":
            return (
                f"{self._wish(wording.layout(result.dims, step.after))}: its blocks change places"
            )
        if step.kind == "all_gather":
            return f"{self._wish(f'whole over {axes} along {dim}')}, so all-gather"
        if step.kind == "all_to_all":
            to = wording.dim_name(result, step.to_dim)
            return f"{self._wish(f'{to}@{axes} instead of {dim}@{axes}')}, so all-to-all"
        return f"{self._wish(f'{dim}@{axes}')}, so each device keeps its slice"

    def _wish(self, layout: str) -> str:
        if self.wanted is None:
            return f"the result is {layout} where nothing else is asked for"
        return f"result wanted {layout}"

    def _nothing(self) -> str:
        lhs, rhs = (o.array for o in self.operands)
        facts = [
            f"{wording.axes(s)} {wording.verb(s, 'shard')} {d} of {a.name}"
            for a, spec, batch in (
                (lhs, self._before[0], self.dims.lhs_batch),
                (rhs, self._before[1], ()),
            )
            for n, (d, s) in enumerate(zip(a.dims, spec, strict=True))
            if s and n not in batch and n not in self.dims.rhs_batch * (a is rhs)
        ]
        whole = wording.listed([lhs.dims[i] for i in self.dims.lhs_k]) or "nothing"
        head = f"{whole} is whole on both" if self.dims.lhs_k else "nothing is summed"
        shared = [
            f"{wording.axes(s)} {wording.verb(s, 'shard')} {lhs.dims[i]} of both"
            for i in self.dims.lhs_batch
            if (s := self._before[0][i])
        ]
        if not facts and not shared:
            return "both operands are whole on every device, so nothing moves"
        return f"{head}, {wording.listed(shared + facts)}: nothing moves"
