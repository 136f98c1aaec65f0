"""The sharding rule of ops that work along the last dim: norms, and sums over rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardops.rules.reduction import Reduction, place_reduction
from shardops.rules.spec import Axes, Sizes, Spec, axes_in, fit, shards

Stats = Literal["auto", "gather", "distributed"]


@dataclass(frozen=True)
class RowwisePlan:
    """How an op along the last dim of [*rows, h] runs on a mesh."""

    rows: Spec  # of every row-shaped operand and result
    hidden: Axes  # axes that shard h: statistics are combined over them
    parameter: Reduction  # of a sum over rows, [h]: a parameter's gradient
    parameter_out: Spec  # of that sum

    @property
    def x(self) -> Spec:
        return (*self.rows, self.hidden)

    @property
    def gamma(self) -> Spec:
        return (self.hidden,)


@lru_cache(maxsize=4096)
def plan_rowwise(
    shape: tuple[int, ...],
    x_spec: Spec,
    axis_sizes: tuple[tuple[str, int], ...],
    stats: Stats = "auto",
    wanted: Spec | None = None,
    parameter_wanted: Spec | None = None,
) -> RowwisePlan:
    """Plan an op along the last dim of x.

    Rows keep the axes that divide them. The last dim keeps its axes where the statistics may be
    combined over the mesh (`distributed`, and `auto`, since a statistic is smaller than its row),
    else it is gathered. A sum over rows is reduced over exactly the axes that shard rows.

    Args:
      shape: [*rows, h] of x.
      x_spec: the sharding offered of x.
      axis_sizes: (mesh axis, devices along it) pairs.
      stats: what happens where the last dim is sharded.
      wanted: the sharding wanted of the row-shaped result. Idle axes there slice x: no bytes.
      parameter_wanted: the sharding wanted of a sum over rows; scatters where it can.
    """
    sizes = dict(axis_sizes)
    spec = [fit(d, n, sizes) for d, n in zip(x_spec, shape, strict=True)]
    if stats == "gather":
        spec[-1] = ()
    if wanted is not None:
        _slice_rows(spec, shape, sizes, wanted)
    rows, hidden = tuple(spec[:-1]), spec[-1]
    parameter, parameter_out = place_reduction(
        axes_in(rows), (hidden,), shape[-1:], sizes, parameter_wanted
    )
    return RowwisePlan(rows, hidden, parameter, parameter_out)


def _slice_rows(spec: list[Axes], shape: Sequence[int], sizes: Sizes, wanted: Spec) -> None:
    for d, want in enumerate(wanted[:-1]):
        have = spec[d]
        if want[: len(have)] != have:
            continue
        busy = axes_in(spec)
        tail = tuple(want[len(have) :])
        idle = tail[: next((n for n, a in enumerate(tail) if a in busy), len(tail))]
        spec[d] = have + fit(idle, shape[d] // shards(have, sizes), sizes)


@dataclass(frozen=True)
class RowSumPlan:
    """How a sum over the leading dims runs on a mesh."""

    operand: Spec
    out: Spec
    reduction: Reduction


@lru_cache(maxsize=4096)
def plan_row_sum(
    shape: tuple[int, ...],
    spec: Spec,
    kept: int,
    rows: int,
    axis_sizes: tuple[tuple[str, int], ...],
    wanted: Spec | None = None,
) -> RowSumPlan:
    """Plan the sum over `rows` dims of an array after its first `kept` (a bias's gradient)."""
    sizes = dict(axis_sizes)
    operand = tuple(fit(d, n, sizes) for d, n in zip(spec, shape, strict=True))
    end = kept + rows
    reduction, out = place_reduction(
        axes_in(operand[kept:end]),
        operand[:kept] + operand[end:],
        shape[:kept] + shape[end:],
        sizes,
        wanted,
    )
    return RowSumPlan(operand, out, reduction)
