"""A call placed on a mesh: the op's plan, and how its operands get to where the plan begins."""

from collections.abc import Sequence
from dataclasses import replace

import jax

from shardops.moving import carry_out
from shardops.op import AxisSizes, Call, Itemsizes, Op, Placement, Shapes, Wanted
from shardops.rules.moves import move
from shardops.rules.parts import check_names
from shardops.rules.spec import Spec, divisible


def placed(
    op: Op,
    shapes: Shapes,
    offered: tuple[Spec, ...],
    axis_sizes: AxisSizes,
    wanted: Wanted,
    itemsizes: Itemsizes,
) -> Placement:
    """The op's placement, with the moves of its operands.

    Operands are taken as they are offered, as far as axes cut their dims into equal parts: a
    shard with padding in it is gathered by whoever calls. Axes of one device count for nothing.
    """
    check_names(axis_sizes)
    taken = tuple(
        divisible(shape, spec, axis_sizes) for spec, shape in zip(offered, shapes, strict=True)
    )
    placement = op.place(Call(shapes, offered, axis_sizes, wanted, itemsizes))
    whole = any(placement.unreduced)  # open sums need types that know no parts of axes
    every = zip(op.operands, shapes, taken, placement.operands, itemsizes, strict=True)
    moves = tuple(
        step
        for name, shape, have, need, size in every
        for step in move(shape, have, need, axis_sizes, size, name, whole)
    )
    return replace(placement, moves=moves, taken=taken)


def arrive(op: Op, shards: Sequence[jax.Array], placement: Placement) -> tuple[jax.Array, ...]:
    """One device's operands, from where they are taken to where the op's local share needs them."""
    return tuple(
        carry_out(x, (s for s in placement.moves if s.array == name))
        for name, x in zip(op.operands, shards, strict=True)
    )
