"""The sharding rule of softmax: every dim but the last is free, the last is whole meanwhile."""

from dataclasses import dataclass
from functools import lru_cache

from shardops.rules.rowwise import RowwiseCall, plan_rowwise
from shardops.rules.spec import Axes, AxisSizes, Spec
from shardops.rules.step import Step


@dataclass(frozen=True)
class SoftmaxPlan:
    """How a softmax over the last dim of [*batch, q, k], or its gradient, runs on a mesh."""

    x: Spec  # of the operands of this shape while the op runs: k is whole
    mask: Spec | None
    out: Spec  # where the result ends
    steps: tuple[Step, ...]  # and how it gets there

    @property
    def queries(self) -> Axes:
        """Axes that shard q, major to minor; a causal mask needs to know which queries it sees."""
        return self.x[-2] if len(self.x) > 1 else ()


@lru_cache(maxsize=4096)
def plan_softmax(
    shape: tuple[int, ...],
    offered: tuple[Spec, ...],
    axis_sizes: AxisSizes,
    mask_shape: tuple[int, ...] | None = None,
    wanted: Spec | None = None,
    itemsizes: tuple[int, ...] = (4, 4),
) -> SoftmaxPlan:
    """Plan a softmax over the last dim.

    While it runs, batch, head and query dims lie in any way; k is whole, for a row's sum takes all
    of it. Of these layouts the one that moves the fewest bytes, operands and result together.

    Args:
      shape: [*batch, q, k].
      offered: the shardings of the operands of this shape: x, or dy and y.
      axis_sizes: (mesh axis, devices along it) pairs.
      mask_shape: of a mask with the rank of x, each dim of size 1 or that of x. It lies as x does
        along the dims that it has.
      wanted: the sharding wanted of the result; None: that of the last operand, k whole.
      itemsizes: bytes of an element of each operand; the result has the last one's.
    """
    main = len(offered) - 1
    call = RowwiseCall(shape, itemsizes[: main + 1], (itemsizes[main],), main=main)
    plan = plan_rowwise(call, offered, axis_sizes, "gather", (wanted,))
    mask = None
    if mask_shape is not None:
        pairs = zip(plan.x, mask_shape, strict=True)
        mask = tuple(() if m == 1 else axes for axes, m in pairs)
    return SoftmaxPlan(plan.x, mask, plan.results[0], plan.departures[0])
