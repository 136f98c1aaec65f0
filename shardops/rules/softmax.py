"""The sharding rule of softmax: every dim but the last is free, the last is gathered."""

from dataclasses import dataclass
from functools import lru_cache

from shardops.rules.rowwise import plan_rowwise
from shardops.rules.spec import Axes, Spec


@dataclass(frozen=True)
class SoftmaxPlan:
    """How a softmax over the last dim of [*batch, q, k] runs on a mesh."""

    x: Spec  # of the logits, the result and their cotangents: k is whole
    mask: Spec | None

    @property
    def queries(self) -> Axes:
        """Axes that shard q, major to minor: a causal mask needs to know which queries it sees."""
        return self.x[-2] if len(self.x) > 1 else ()


@lru_cache(maxsize=4096)
def plan_softmax(
    shape: tuple[int, ...],
    x_spec: Spec,
    axis_sizes: tuple[tuple[str, int], ...],
    mask_shape: tuple[int, ...] | None = None,
    wanted: Spec | None = None,
) -> SoftmaxPlan:
    """Plan a softmax over the last dim of x.

    Batch, head and query dims keep the axes that divide them; k is gathered, for a row's sum takes
    all of it. A result that is wanted with k sharded is computed whole.

    Args:
      shape: [*batch, q, k] of x.
      x_spec: the sharding offered of x.
      axis_sizes: (mesh axis, devices along it) pairs.
      mask_shape: of a mask with the rank of x, each dim of size 1 or that of x. It lies as x does
        along the dims that it has.
      wanted: the sharding wanted of the result. Idle axes there slice x: no bytes.
    """
    x = plan_rowwise(shape, x_spec, axis_sizes, stats="gather", wanted=wanted).x
    if mask_shape is None:
        return SoftmaxPlan(x, None)
    whole = [() if m == 1 else axes for axes, m in zip(x, mask_shape, strict=True)]
    return SoftmaxPlan(x, tuple(whole))
