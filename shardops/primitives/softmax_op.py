"""Forward and backward of softmax as ops: placement, local share, vmap rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from shardops import array_type, routing
from shardops.moving import carry_out
from shardops.op import Arrays, Call, Inner, Placement, Shapes, Wanted, with_new_dim
from shardops.primitives.softmax_local import (
    backward_reference,
    local_backward,
    local_forward,
)
from shardops.rules.softmax import SoftmaxPlan, plan_softmax

Factors = tuple[list[list[str]], list[list[str]]]
SoftmaxOp = TypeVar("SoftmaxOp", "SoftmaxForward", "SoftmaxBackward")


@dataclass(frozen=True)
class SoftmaxForward:
    """Operands: x, [mask], [first]. Result: y.

    The mask has the rank of x, its dims are 1 or those of x. `first` is which query row 0 of x is:
    an int32 scalar, there where x is already one device's share of the queries.
    """

    scale: float
    mask: bool
    diagonal: int | None  # causal: query i sees keys up to i + diagonal
    kernel: bool
    first: bool = False

    @property
    def scope(self) -> str:
        return "shardops.softmax"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("x", *("mask",) * self.mask, *("first",) * self.first)

    def place(self, call: Call) -> Placement:
        mask = call.shapes[1] if self.mask else None
        plan = plan_softmax(
            call.shapes[0], call.specs[:1], call.sizes, mask, call.want(), call.itemsizes[:1]
        )
        masks = () if plan.mask is None else (plan.mask,)
        operands = (plan.x, *masks, *((),) * self.first)
        return Placement(operands, (plan.out,), plan, plan.steps)

    def factors(self, shapes: Shapes) -> Factors:
        # Where the mask lies must not decide where x does, nor k's axes where those of y do.
        names = [[f"{kind}{i}" for i in range(len(shapes[0]))] for kind in ("r", "m")]
        x, mask = names
        operands = [x, *[mask] * self.mask, *[[]] * self.first]
        return operands, [[*x[:-1], "o"]]

    def local(
        self, plan: SoftmaxPlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        if plan is None:
            statics = {"scale": self.scale, "mask": self.mask, "diagonal": self.diagonal}
            return local_forward(*arrays, **statics, first=self.first, kernel=self.kernel)
        op = self
        if self.diagonal is not None and plan.queries:
            op, arrays = _with_first(self, plan, arrays)
        (y,) = inner(op, *arrays)
        return (carry_out(y, plan.steps),)

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """A new dim is one more batch dim; a mask without it is the same for all of them."""
        del wanted
        x, *masks = arrays
        if not batched[0]:
            x = jnp.broadcast_to(x, (size, *x.shape))
        masks = [m if b else m[None] for m, b in zip(masks, batched[1:], strict=True)]
        return routing.run(self, (x, *masks), ())


@dataclass(frozen=True)
class SoftmaxBackward:
    """Operands: dy, y, [first]. Result: dx. `diagonal` and `first` as of the forward."""

    scale: float
    kernel: bool
    diagonal: int | None = None
    first: bool = False

    @property
    def scope(self) -> str:
        return "shardops.softmax.grad"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("dy", "y", *("first",) * self.first)

    def place(self, call: Call) -> Placement:
        plan = plan_softmax(
            call.shapes[1], call.specs[:2], call.sizes, None, call.want(), call.itemsizes[:2]
        )
        operands = (plan.x, plan.x, *((),) * self.first)
        return Placement(operands, (plan.out,), plan, plan.steps)

    def factors(self, shapes: Shapes) -> Factors:
        # Where the keys of dy lie must not decide where those of y do: the forward made y whole.
        rows = [f"r{i}" for i in range(len(shapes[1]) - 1)]
        return [[*rows, "d"], [*rows, "k"], *[[]] * self.first], [[*rows, "o"]]

    def local(
        self, plan: SoftmaxPlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        if plan is None:
            statics = {"scale": self.scale, "diagonal": self.diagonal, "first": self.first}
            return local_backward(*arrays, **statics, kernel=self.kernel)
        op = self
        if self.diagonal is not None and plan.queries:
            op, arrays = _with_first(self, plan, arrays)
        (dx,) = inner(op, *arrays)
        return (carry_out(dx, plan.steps),)

    def reference(self, dy: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        """The op in plain jnp, its operands laid out alike first: Explicit axes want that."""
        spec = array_type.explicit_spec(y)
        dy = dy if spec is None else array_type.laid_out(dy, spec)
        return backward_reference(dy, y, scale=self.scale, diagonal=self.diagonal)

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """A new dim is one more batch dim."""
        del wanted
        return routing.run(self, with_new_dim(size, batched, arrays), ())


def _with_first(
    op: SoftmaxOp, plan: SoftmaxPlan, arrays: Arrays
) -> tuple[SoftmaxOp, tuple[jax.Array, ...]]:
    """The op with this device's first query as its last operand."""
    first = jax.lax.axis_index(plan.queries) * arrays[0].shape[-2]
    if op.first:
        first = first + arrays[-1]
    others = arrays[:-1] if op.first else arrays
    return replace(op, first=True), (*others, first)
