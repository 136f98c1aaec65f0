"""The sum over leading dims: a bias's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardops import array_type, routing
from shardops.moving import carry_out
from shardops.op import (
    Arrays,
    Call,
    Inner,
    Placement,
    Shapes,
    Wanted,
    with_derivative,
)
from shardops.rules.rowwise import RowSumPlan, plan_row_sum
from shardops.rules.spec import Axes, Spec, among


def row_sum(
    op: str, x: jax.Array, rows: int, wanted: Spec | None = None, unreduced: Axes = ()
) -> jax.Array:
    """Sum over the first dims.

        out[*c] = sum_r x[*r, *c]

    Args:
      op: the op that asks, for profiles and HLO.
      x: [*r, *c].
      rows: how many dims r are.
      wanted: the sharding wanted of the result.
      unreduced: axes over which the result is to stay unreduced.
    Returns: [*c] in float32.
    Sharding: one all-reduce over the axes that shard rows, or one reduce-scatter where the result
      is wanted sharded over them.
    """
    return _row_sum(RowSumOp(op, rows, unreduced=unreduced), wanted, x)


@dataclass(frozen=True)
class RowSumOp:
    """Operand x [kept, *r, *c], result [kept, *c]: `kept` leading dims are not summed."""

    name: str
    rows: int
    kept: int = 0
    unreduced: Axes = ()
    kernel: bool = False  # there is none

    @property
    def scope(self) -> str:
        return f"shardops.{self.name}"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("x",)

    def place(self, call: Call) -> Placement:
        deferred = among(self.unreduced, call.sizes)
        plan = plan_row_sum(
            call.shapes[0], call.specs[0], self.kept, self.rows, call.sizes, call.want(), deferred
        )
        return Placement(
            (plan.operand,), (plan.out,), plan, plan.steps, unreduced=(plan.unreduced,)
        )

    def factors(self, shapes: Shapes) -> tuple[list[list[str]], list[list[str]]]:
        names = [f"d{i}" for i in range(len(shapes[0]))]
        return [names], [names[: self.kept] + names[self.kept + self.rows :]]

    def local(self, plan: RowSumPlan | None, arrays: Arrays, inner: Inner) -> tuple[jax.Array, ...]:
        if plan is None:
            summed = tuple(range(self.kept, self.kept + self.rows))
            return (jnp.sum(arrays[0].astype(jnp.float32), summed),)
        (partial,) = inner(self, *arrays)
        return (carry_out(partial, plan.steps),)

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        del size, batched
        spec = array_type.explicit_spec(arrays[0])
        asked = tuple(None if w is None else (spec[0] if spec else (), *w) for w in wanted)
        return routing.run(replace(self, kept=self.kept + 1), arrays, asked)


@with_derivative
def _row_sum(op: RowSumOp, wanted: Spec | None, x: jax.Array) -> jax.Array:
    return routing.run(op, (x,), (wanted,))[0]


def _save(op: RowSumOp, wanted: Spec | None, x: jax.Array) -> Any:
    return _row_sum(op, wanted, x), x


def _pull(op: RowSumOp, wanted: Spec | None, x: jax.Array, dout: jax.Array) -> Any:
    del op, wanted
    return (array_type.Type.of(x).apply(jnp.broadcast_to(dout, x.shape)),)


_row_sum.defvjp(_save, _pull)
