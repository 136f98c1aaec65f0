"""Where what comes after a product comes in: bias, activation, and an array that is added.

After the last sum, as a plan has it; or where the result ends; or, on the way there, where the
added array lies: whichever moves the least.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardops.rules.gemm_dims import Dims, GemmPlan
from shardops.rules.hardware import DEFAULT
from shardops.rules.moves import move
from shardops.rules.spec import AxisSizes, Spec


@dataclass(frozen=True)
class Addend:
    """A bias or an array that is added, as it is offered."""

    shape: Dims
    spec: Spec  # divides the shape
    itemsize: float


def finish_where_cheapest(
    planned: GemmPlan,
    out_shape: Dims,
    sizes: AxisSizes,
    itemsize: float,
    bias: Addend | None,
    add: Addend | None,
    plan_to: Callable[[Spec], GemmPlan],
) -> GemmPlan:
    """The plan with bias, activation and `add` where they cost the least to move.

    `itemsize`: bytes of an element of the result. `plan_to`: the product's plan for another result.
    """

    def moved(plan: GemmPlan) -> float:
        to_finish = _bytes(bias, plan.bias, sizes) + _bytes(add, plan.finished, sizes)
        return plan.bytes + to_finish

    best = planned
    if planned.after_finish:
        best = min(planned, planned.finished_late(), key=moved)
    if add is not None and add.spec != best.finished:
        there = plan_to(add.spec)
        moves = move(out_shape, there.out, planned.out, sizes, itemsize, "out")
        there = there.finished_on_the_way(planned.out, moves)
        saved = moved(best) - moved(there)
        # Fewer bytes may take more operations.
        if saved > 0 and saved / DEFAULT.bandwidth > (there.flops - best.flops) / DEFAULT.peak:
            best = there
    return best


def _bytes(addend: Addend | None, need: Spec, sizes: AxisSizes) -> float:
    if addend is None:
        return 0
    steps = move(addend.shape, addend.spec, need, sizes, addend.itemsize)
    return sum(step.bytes for step in steps)
