"""The steps of a record, those that lie outside of the op included."""

from math import prod

import jax.numpy as jnp

from shardops.recording import Record
from shardops.rules.spec import even, local_shape, shards
from shardops.rules.step import Step


def all_steps(record: Record) -> tuple[Step, ...]:
    """The partitioner's gathers of uneven dims, the moves of operands, the op's own steps."""
    return (*uneven_gathers(record), *record.placement.moves, *record.placement.steps)


def uneven_gathers(record: Record) -> tuple[Step, ...]:
    """Gathers over axes that do not cut a dim into equal parts.

    The partitioner does them before an op takes its operands: a shard with padding in it cannot be
    summed over.
    """
    sizes = dict(record.sizes)
    steps: list[Step] = []
    operands = zip(record.op.operands, record.shapes, record.offered, record.dtypes, strict=True)
    for name, shape, spec, dtype in operands:
        fitting = even(shape, spec, sizes)
        received = jnp.dtype(dtype).itemsize * prod(local_shape(shape, fitting, sizes))
        for d, kept in enumerate(fitting):
            lost = spec[d][len(kept) :]
            if lost:
                after = (*spec[:d], kept, *spec[d + 1 :])
                n = shards(lost, sizes)
                moved = received * (n - 1) / n
                steps.append(Step("all_gather", lost, spec, after, moved, name, d))
                spec = after
    return tuple(steps)
