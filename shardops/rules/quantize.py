"""The sharding rule of quantisation: whole blocks on a device, one maximum over the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, TypeVar

from shardops.rules.moves import move
from shardops.rules.rowwise import RowwiseCall, RowwisePlan, Stats, plan_rowwise
from shardops.rules.scales import scale_shape
from shardops.rules.spec import Axes, AxisSizes, Spec, axes_in, even, fit, local_shape, shards
from shardops.rules.step import Step

Layout = Literal["rows", "columns", "both"]
T = TypeVar("T")


@dataclass(frozen=True)
class Blocks:
    """What is written of an array [*added, *rows, h], and what a scale covers.

    Rows are the array as it is; columns have h in front of the rows.
    """

    layout: Layout
    block: tuple[int, int] | None  # elements of the last two dims of x; None: all of the array
    added: int = 0  # leading dims of which each entry has scales of its own

    @property
    def rows(self) -> bool:
        return self.layout != "columns"

    @property
    def columns(self) -> bool:
        return self.layout != "rows"

    def of_rows(self, rank: int) -> tuple[int, ...] | None:
        """The block of a scale, one number a dim of x."""
        return None if self.block is None else ((1,) * rank + self.block)[-rank:]

    def of_columns(self, rank: int) -> tuple[int, ...] | None:
        """The block of a scale, one number a dim of columns: its 128 or 32 lie along the rows."""
        block = self.of_rows(rank)
        return block if block is None or block.count(1) == rank - 1 else self.turned(block)

    def turned(self, dims: Sequence[T]) -> tuple[T, ...]:
        """What belongs to the dims of x, in the order of columns."""
        return (*dims[: self.added], dims[-1], *dims[self.added : -1])

    def units(self, rank: int) -> tuple[int, ...]:
        """Multiples of how many elements of each dim of x must lie on one device."""
        units = (1,) * rank
        every = [self.of_rows(rank)] * self.rows
        if self.columns and (block := self.of_columns(rank)):
            every.append((*block[: self.added], *block[self.added + 1 :], block[self.added]))
        for block in every:
            units = tuple(map(max, units, block or units))
        return units

    def fitted(self, shape: Sequence[int], spec: Spec, axis_sizes: AxisSizes) -> Spec:
        """`spec` as far as whole blocks lie on one device."""
        sizes = dict(axis_sizes)
        units = self.units(len(shape))
        return tuple(fit(d, n, sizes, u) for d, n, u in zip(spec, shape, units, strict=True))

    def scale_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Of the scales of rows, then of columns, as far as there are any."""
        rank, out = len(shape), []
        if self.block is not None and self.rows:
            out.append(scale_shape(shape, self.of_rows(rank)))
        if self.block is not None and self.columns:
            out.append(scale_shape(self.turned(shape), self.of_columns(rank)))
        return out


@dataclass(frozen=True)
class QuantizePlan:
    """How an array is quantised on a mesh."""

    x: Spec  # while it is quantised; scales lie so
    rows: Spec  # where the data end
    row_steps: tuple[Step, ...]
    columns: Spec
    column_steps: tuple[Step, ...]
    amax: Spec  # of the largest magnitudes, one an added entry
    amax_axes: Axes  # which they are the maximum over
    amax_steps: tuple[Step, ...]


@lru_cache(maxsize=4096)
def plan_quantize(
    shape: tuple[int, ...],
    spec: Spec,
    axis_sizes: AxisSizes,
    blocks: Blocks,
    numbers: int = 1,
    end: Spec | None = None,
) -> QuantizePlan:
    """Plan quantisation.

    Data follow x; scales lie as their blocks do. A dim whose shards break a block is gathered, and
    the data are cut again afterwards.

    Args:
      shape: [*added, *rows, h].
      spec: where x is offered.
      axis_sizes: (mesh axis, devices along it) pairs.
      numbers: how many numbers a maximum over the mesh has.
      end: where the data are to end; None: where x is offered.
    """
    sizes = dict(axis_sizes)
    offered = even(shape, spec, sizes)
    at = blocks.fitted(shape, offered, axis_sizes)
    end = offered if end is None else end
    turned = blocks.turned(shape), blocks.turned(at), blocks.turned(end)
    amax, over = at[: blocks.added], axes_in(at[blocks.added :])
    axes = tuple(a for a in over if sizes[a] > 1)
    amax_steps: tuple[Step, ...] = ()
    if axes and numbers:
        n = shards(axes, sizes)
        each = 4 * numbers * prod(local_shape(shape[: blocks.added], amax, sizes))
        amax_steps = (Step("psum", axes, amax, amax, 2 * each * (n - 1) / n, "amax"),)
    return QuantizePlan(
        at,
        end,
        move(shape, at, end, axis_sizes, 1, "data") if blocks.rows else (),
        turned[2],
        move(*turned, axis_sizes, 1, "transposed data") if blocks.columns else (),
        amax,
        axes if numbers else (),
        amax_steps,
    )


@dataclass(frozen=True)
class QuantisedRows:
    """How an op along the last dim runs on a mesh, its first result quantised."""

    rowwise: RowwisePlan  # of its other results and its statistics
    written: QuantizePlan

    @property
    def steps(self) -> tuple[Step, ...]:
        """What the op itself moves, its operands apart."""
        rowwise, written = self.rowwise, self.written
        others = tuple(s for way in rowwise.departures[1:] for s in way)
        moved = (*written.row_steps, *written.column_steps, *others)
        return (*rowwise.statistics, *written.amax_steps, *moved)


@lru_cache(maxsize=4096)
def plan_quantised_rows(
    call: RowwiseCall,
    offered: tuple[Spec, ...],
    axis_sizes: AxisSizes,
    stats: Stats,
    wanted: tuple[Spec | None, ...],
    blocks: Blocks,
    numbers: int = 0,
) -> QuantisedRows:
    """Plan an op along the last dim, its first result quantised where it is computed.

    As `plan_rowwise`, but the rows lie in whole blocks; the first result ends where it would end
    otherwise.
    """
    usual = plan_rowwise(call, offered, axis_sizes, stats, wanted)
    ends = (usual.results[0], *usual.results[1:])
    plan, tries = usual, (*(True,) * len(axis_sizes), False)
    for keep in tries:
        fitted = blocks.fitted(call.shape, plan.x, axis_sizes)
        if fitted == plan.x:
            break
        # Offered so, and with nothing to move for it, it stays so, or loses more; at last all.
        fitted = fitted if keep else ((),) * len(call.shape)
        every = (fitted,) * len(offered)
        plan = plan_rowwise(call, every, axis_sizes, stats, (fitted, *ends[1:]))
    written = plan_quantize(call.shape, plan.x, axis_sizes, blocks, numbers, ends[0])
    return QuantisedRows(plan, written)
