"""A product without its sharding, and the plan of a sharded one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from shardops.rules.spec import Axes, Spec
from shardops.rules.step import Step

Dims = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class GemmDims:
    """A product without its sharding. Result dims: batch, lhs free, rhs free.

    `lhs_k[i]` is contracted with `rhs_k[i]`; `lhs_batch[i]` and `rhs_batch[i]` are one dim of the
    result. The batch-like dims are no batched product: they decide who keeps a contested mesh axis,
    and tell a data-parallel reduction from a model-parallel one.
    """

    lhs_shape: Dims
    rhs_shape: Dims
    lhs_k: Dims
    rhs_k: Dims
    lhs_batch: Dims = ()
    rhs_batch: Dims = ()
    lhs_batch_like: Dims = ()
    rhs_batch_like: Dims = ()

    @cached_property
    def lhs_free(self) -> Dims:
        return _others(len(self.lhs_shape), self.lhs_k + self.lhs_batch)

    @cached_property
    def rhs_free(self) -> Dims:
        return _others(len(self.rhs_shape), self.rhs_k + self.rhs_batch)

    @cached_property
    def out_shape(self) -> Dims:
        return self.to_out(self.lhs_shape, self.rhs_shape)

    @cached_property
    def loops(self) -> tuple[tuple[int | None, int | None], ...]:
        """The dims of lhs and rhs of each loop: those of the result in order, then contracting."""
        return (
            *zip(self.lhs_batch, self.rhs_batch, strict=True),
            *((i, None) for i in self.lhs_free),
            *((None, j) for j in self.rhs_free),
            *zip(self.lhs_k, self.rhs_k, strict=True),
        )

    def to_out(self, lhs: Sequence[T], rhs: Sequence[T]) -> tuple[T, ...]:
        """What belongs to the dims of the operands, in the order of the result's dims."""
        return (
            *(lhs[i] for i in self.lhs_batch),
            *(lhs[i] for i in self.lhs_free),
            *(rhs[j] for j in self.rhs_free),
        )

    def of_operand(self, loops: Sequence[Axes], side: int) -> Spec:
        """The spec of lhs (side 0) or rhs (1) where `loops` are sharded so."""
        spec: list[Axes] = [()] * len((self.lhs_shape, self.rhs_shape)[side])
        for pair, axes in zip(self.loops, loops, strict=True):
            dim = pair[side]
            if dim is not None:
                spec[dim] = axes
        return tuple(spec)

    @property
    def out_batch_like(self) -> Dims:
        """Positions of the result's batch-like dims."""
        lhs = [i in self.lhs_batch_like for i in range(len(self.lhs_shape))]
        rhs = [j in self.rhs_batch_like for j in range(len(self.rhs_shape))]
        return tuple(p for p, like in enumerate(self.to_out(lhs, rhs)) if like)


@dataclass(frozen=True)
class GemmPlan:
    """How a product runs on a mesh: the operands are moved, multiplied, and the result is moved."""

    lhs: Spec  # where the operands lie in the local product
    rhs: Spec
    partial: Spec  # the local product, before the sums over the mesh
    finished: Spec  # where bias, activation and rounding come in
    out: Spec  # the result
    steps: tuple[Step, ...]  # of "lhs", "rhs" and "out", each in order
    flops: float  # operations of one device
    reduce: Axes = ()  # of the summed axes: those that shard contracting dims of the model
    batch_reduce: Axes = ()  # and those that shard contracted batch-like dims (a weight gradient's)
    unreduced: Axes = ()  # axes over which `out` is still to be summed, as was asked for
    bias: Spec = ()  # of a bias over the rhs's free dims, where it is added
    lhs_scale: Spec | None = None  # block scales follow the operand; None: one replicated scale
    rhs_scale: Spec | None = None
    finish_after: int | None = None  # steps of "out" before `finished`; None: up to the last sum

    def finished_late(self) -> "GemmPlan":
        """The same moves, with bias and activation where the result ends."""
        return self._finished_at(self.out, self.steps)

    def finished_on_the_way(self, to: Spec, moves: tuple[Step, ...]) -> "GemmPlan":
        """With bias and activation where this plan ends; `moves` take the result on `to` there."""
        return replace(self._finished_at(self.out, self.steps + moves), out=to)

    def _finished_at(self, finished: Spec, steps: tuple[Step, ...]) -> "GemmPlan":
        bias = finished[len(finished) - len(self.bias) :]
        after = len(self.of("out"))
        return replace(self, finished=finished, bias=bias, steps=steps, finish_after=after)

    @property
    def operands(self) -> tuple[Spec, Spec]:
        return self.lhs, self.rhs

    @property
    def bytes(self) -> float:
        """What a device receives, under ring algorithms."""
        return sum(s.bytes for s in self.steps)

    def of(self, array: str) -> tuple[Step, ...]:
        """The steps of one array."""
        return tuple(s for s in self.steps if s.array == array)

    @property
    def summing(self) -> tuple[Step, ...]:
        """The result's steps up to its last sum."""
        steps = self.of("out")
        sums = [n for n, s in enumerate(steps) if s.sums]
        return steps[: sums[-1] + 1] if sums else ()

    @property
    def before_finish(self) -> tuple[Step, ...]:
        """The result's steps before bias and activation."""
        return self.summing if self.finish_after is None else self.of("out")[: self.finish_after]

    @property
    def after_finish(self) -> tuple[Step, ...]:
        """The result's steps after bias and activation."""
        return self.of("out")[len(self.before_finish) :]


def _others(ndim: int, taken: Dims) -> Dims:
    return tuple(d for d in range(ndim) if d not in taken)
