"""The gradient of a product is one op of two products: a record of each."""

from dataclasses import dataclass, replace
from typing import Literal

from shardops.op import Placement
from shardops.primitives.gemm_grad import GemmGradOp
from shardops.primitives.gemm_op import GemmOp
from shardops.recording import Record
from shardops.rules.gemm_dims import GemmPlan
from shardops.rules.spec import Spec

Gradient = Literal["", "lhs", "rhs"]  # which operand's cotangent a product gives; "": it is none


@dataclass(frozen=True)
class Part:
    """A record of an op that is reported as one."""

    record: Record
    gradient: Gradient = ""


def parts(record: Record) -> tuple[Part, ...]:
    """The two products of a gradient, in the order in which they are carried out; else the record.

    The cotangent is moved for the first product; the second one starts from wherever it came by.
    """
    op, plan = record.op, record.placement.plan
    if not isinstance(op, GemmGradOp) or plan is None:
        return (Part(record),)
    dz, lhs, rhs = record.offered
    ways = plan.of_dz if plan.lhs_first else plan.of_dz[::-1]
    need = plan.to_rhs.rhs if plan.lhs_first else plan.to_lhs.lhs
    second = ways[1][0].before if ways[1] else need
    by_lhs, by_rhs = (dz, second) if plan.lhs_first else (second, dz)
    to_lhs = Part(_product(record, op.to_lhs, plan.to_lhs, (0, 2), (by_lhs, rhs), 0), "lhs")
    to_rhs = Part(_product(record, op.to_rhs, plan.to_rhs, (1, 0), (lhs, by_rhs), 1), "rhs")
    return (to_lhs, to_rhs) if plan.lhs_first else (to_rhs, to_lhs)


def _product(
    record: Record,
    op: GemmOp,
    plan: GemmPlan,
    operands: tuple[int, int],
    offered: tuple[Spec, Spec],
    result: int,
) -> Record:
    """One of the products. `operands`, `result`: which of the record's they are."""
    moves = plan.of("lhs") + plan.of("rhs")
    placement = Placement((plan.lhs, plan.rhs), (plan.out,), plan, plan.of("out"), moves)
    return replace(
        record,
        op=op,
        shapes=tuple(record.shapes[n] for n in operands),
        dtypes=tuple(record.dtypes[n] for n in operands),
        offered=offered,
        wanted=record.wanted[result : result + 1],
        placement=placement,
    )
