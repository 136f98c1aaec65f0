"""Why an op moves what it moves, in one sentence."""

from shardops.explaining import wording
from shardops.explaining.gemm_reasons import GemmReason
from shardops.explaining.names import Names
from shardops.explaining.steps import uneven_gathers
from shardops.op import Op
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.norm_op import NormBackward, NormForward
from shardops.primitives.row_sum import RowSumOp
from shardops.recording import Record
from shardops.rules.spec import axes_in
from shardops.rules.step import Step


def reason(record: Record, names: Names) -> str:
    """One sentence about a record: which axis shards what, what that makes necessary, and why."""
    op = record.op
    if record.route == "alone":
        return "one device has it all: no collective."
    if isinstance(op, GemmOp):
        return str(GemmReason(record, op, names))
    moves = [s for s in record.placement.moves if s.kind != "slice"]
    clauses = [_uneven(names, s) for s in uneven_gathers(record)]
    clauses += [_move(op, names, s) for s in moves]
    clauses += [_own(op, names, s) for s in record.placement.steps if s.kind != "slice"]
    if not clauses:
        clauses = [_nothing(record, names)]
    return "; ".join(dict.fromkeys(clauses)) + "."


def _uneven(names: Names, step: Step) -> str:
    array, axes = names.called(step.array), wording.axes(step.axes)
    dim = wording.dim_name(array, step.dim)
    return f"{axes} does not cut {dim} of {array.name} into equal parts: gathered"


def _move(op: Op, names: Names, step: Step) -> str:
    array, axes = names.called(step.array), wording.axes(step.axes)
    if step.kind == "ppermute":
        want = wording.layout(array.dims, step.after)
        return f"{array.name} is needed as {want}: its blocks change places"
    dim = wording.dim_name(array, step.dim)
    rows = isinstance(op, NormForward | NormBackward) and len(array.dims) > 1
    if step.kind == "all_to_all":
        to = wording.dim_name(array, step.to_dim)
        why = ", so that each device has whole rows" if rows and dim == "H" else ""
        return f"{axes} moves from {dim} to {to} of {array.name}{why}: all-to-all"
    if rows and dim == "H":
        return f"H of {array.name} is sharded over {axes}, and a row is needed whole: gathered"
    return f"{axes} shards {dim} of {array.name}, which the op needs whole or otherwise: gathered"


def _own(op: Op, names: Names, step: Step) -> str:
    """A sum over the mesh, or a move of a result."""
    array, axes, kind = names.called(step.array), wording.axes(step.axes), step.kind
    collective = wording.COLLECTIVES[kind]
    if not step.sums:
        want = wording.layout(array.dims, step.after)
        return f"{array.name} is wanted as {want}: {collective}"
    asked = f" to the wanted {wording.layout(array.dims, step.after)}" * (kind == "psum_scatter")
    if step.array == "statistics":
        return f"H is sharded over {axes}, so a row's statistics are summed over it: {collective}"
    if step.array == "parameter":
        return f"rows are sharded over {axes}, and {array.name} sum over rows: {collective}{asked}"
    if isinstance(op, RowSumOp):
        return f"the summed dims are sharded over {axes}: partial sums, so {collective}{asked}"
    return f"partial results over {axes}, so {collective}{asked}"


def _nothing(record: Record, names: Names) -> str:
    first, spec = names.operands[0], record.placement.operands[0]
    if not axes_in(spec):
        return f"{first.name} is whole on every device, so nothing moves"
    have = wording.layout(first.dims, spec)
    return f"{first.name} is {have}, and each device has all that its part needs: nothing moves"
