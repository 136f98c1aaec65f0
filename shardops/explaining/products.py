"""The gradient of a product is one op of two products: a record of each."""

from dataclasses import dataclass, replace
from typing import Literal

from shardops.op import Placement
from shardops.primitives.gemm_grad import GemmGradOp
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import ScaledGemmOp
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
    offered, numbers = op.sides(record.offered), op.sides(range(len(op.operands)))
    dz, lhs, rhs = offered.dz[0], offered.lhs[0], offered.rhs[0]
    ways = plan.of_dz if plan.lhs_first else plan.of_dz[::-1]
    need = plan.to_rhs.rhs if plan.lhs_first else plan.to_lhs.lhs
    second = ways[1][0].before if ways[1] else need
    by_lhs, by_rhs = (dz, second) if plan.lhs_first else (second, dz)
    of_dz = numbers.dz
    if plan.turned:
        of_dz, by_rhs = numbers.turned, offered.turned[0]
    products = op.products(plan.turned)
    to_lhs = Part(
        _product(record, products[0], plan.to_lhs, (numbers.dz, numbers.rhs), (by_lhs, rhs), 0),
        "lhs",
    )
    to_rhs = Part(
        _product(record, products[1], plan.to_rhs, (numbers.lhs, of_dz), (lhs, by_rhs), 1), "rhs"
    )
    return (to_lhs, to_rhs) if plan.lhs_first else (to_rhs, to_lhs)


def _product(
    record: Record,
    op: GemmOp | ScaledGemmOp,
    plan: GemmPlan,
    operands: tuple[tuple[int, ...], tuple[int, ...]],
    offered: tuple[Spec, Spec],
    result: int,
) -> Record:
    """One of the products.

    Args:
      operands: which of the record's belong to its lhs and to its rhs: data, scales.
      offered: where its lhs and its rhs are.
      result: which of the record's is its own.
    """
    whole = record.placement
    moves, specs, used = plan.of("lhs") + plan.of("rhs"), [], []
    for numbers, spec, data in zip(operands, offered, (plan.lhs, plan.rhs), strict=True):
        specs += [spec, *(record.offered[n] for n in numbers[1:])]
        used += [data, *(whole.operands[n] for n in numbers[1:])]
        scales = {record.op.operands[n] for n in numbers[1:]}
        moves += tuple(step for step in whole.moves if step.array in scales)
    every = [n for numbers in operands for n in numbers]
    return replace(
        record,
        op=op,
        shapes=tuple(record.shapes[n] for n in every),
        dtypes=tuple(record.dtypes[n] for n in every),
        offered=tuple(specs),
        wanted=record.wanted[result : result + 1],
        placement=Placement(tuple(used), (plan.out,), plan, plan.of("out"), moves),
    )
