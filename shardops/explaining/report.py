"""What `explain` returns: every op, what it moves between devices, and why."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardops import hlo
from shardops.explaining import timing
from shardops.explaining.compare import Plain, plain
from shardops.explaining.computed import computed
from shardops.explaining.names import Array, Dims, Names, names, result_shapes
from shardops.explaining.products import Gradient, parts
from shardops.explaining.reasons import reason
from shardops.explaining.steps import all_steps
from shardops.explaining.suggest import Suggestion, suggestion
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import ScaledGemmOp
from shardops.primitives.scaling import ScalingMode
from shardops.recording import Record
from shardops.rules.hardware import DEFAULT, Link
from shardops.rules.spec import Spec
from shardops.rules.step import Step


@dataclass(frozen=True)
class Held:
    """An operand or a result of an op.

    Attributes:
      array: its name and those of its dims.
      dtype, shape: the whole array's.
      spec: as it was offered; of a result, as it is returned.
      used: as the local share of the op takes it.
    """

    array: Array
    dtype: str
    shape: tuple[int, ...]
    spec: Spec
    used: Spec


@dataclass(frozen=True)
class Entry:
    """One op of a report.

    Attributes:
      record: what the router noted down.
      names: of the arrays and their dims.
      link: that predicted times are for.
      reason: why it moves what it moves, in one sentence.
      suggestion: a small change of a spec that would save more than 10 % of the bytes, or None.
      plain: what XLA alone would move, or None where it was not asked.
      gradient: which operand's cotangent a product gives: "lhs" | "rhs"; "" for others.
    """

    record: Record
    names: Names
    link: Link
    reason: str
    suggestion: Suggestion | None = None
    plain: Plain | None = None
    gradient: Gradient = ""

    @property
    def name(self) -> str:
        """gemm, rms_norm, …"""
        return self.record.op.scope.removeprefix("shardops.").removesuffix(".grad")

    @property
    def backward(self) -> bool:
        """Whether it belongs to a gradient."""
        return bool(self.gradient) or self.record.op.scope.endswith(".grad")

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in order, those of the operands before the op's own."""
        return all_steps(self.record)

    @property
    def computed(self) -> str | None:
        """In what arithmetic a product of quantised operands runs, and why; what a kernel copies
        first of the operands of another; None where there is nothing to say."""
        return computed(self.record)

    @property
    def bytes(self) -> float:
        """That a device receives, under ring algorithms."""
        return sum(s.bytes for s in self.steps)

    @property
    def flops(self) -> float:
        """Of the product, on one device; 0 for other ops."""
        return float(getattr(self.record.placement.plan, "flops", 0.0))

    @property
    def microseconds(self) -> float:
        """Predicted time of the steps, one after another."""
        return sum(self.step_microseconds(s) for s in self.steps)

    def step_microseconds(self, step: Step) -> float:
        """Predicted time of one step."""
        return timing.microseconds(step, dict(self.record.sizes), self.link)

    @property
    def product_microseconds(self) -> float:
        """Time of the product at the device's peak."""
        return 1e6 * self.flops / self.link.peak

    @property
    def operands(self) -> tuple[Held, ...]:
        record = self.record
        return tuple(
            Held(a, dtype, shape, spec, used)
            for a, dtype, shape, spec, used in zip(
                self.names.operands,
                record.dtypes,
                record.shapes,
                record.offered,
                record.placement.operands,
                strict=False,
            )
        )

    @property
    def results(self) -> tuple[Held, ...]:
        shapes = result_shapes(self.names, self.record.shapes, self.record.op)
        return tuple(
            Held(a, self._result_dtype(a), shape, spec, spec)
            for a, shape, spec in zip(
                self.names.results, shapes, self.record.placement.results, strict=False
            )
        )

    def _result_dtype(self, array: Array) -> str:
        """Results of other ops than products: that of the operand, sums in float32."""
        op = self.record.op
        product = op.product if isinstance(op, ScaledGemmOp) else op
        if isinstance(product, GemmOp):
            return product.out_dtype
        form = getattr(op, "form", None)
        if form is not None and "data" in array.name:
            return form.format
        if array.name.endswith("scales"):
            return "float8_e8m0fnu" if form and form.mode is ScalingMode.MXFP8 else "float32"
        like = self.names.operands[0].dims == array.dims
        return self.record.dtypes[0] if like else "float32"


@dataclass(frozen=True)
class Report:
    """What the shardops ops of a program move, and why.

    `str(report)` is text, `rich.print(report)` a table, `report.to_html()` a page of its own,
    `report.to_dict()` plain data.

    Attributes:
      entries: one for each op that was placed on a mesh or on one device, in the program's order.
      link: that predicted times are for.
      collectives: those of the compiled program; None where nothing was compiled.
      notes: what the report does not show.
    """

    entries: tuple[Entry, ...]
    link: Link = DEFAULT
    collectives: tuple[hlo.Collective, ...] | None = None
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def bytes(self) -> float:
        """That a device receives for all the ops, forward and backward."""
        return sum(e.bytes for e in self.entries)

    @cached_property
    def microseconds(self) -> float:
        """Predicted time of all that moves, one step after another."""
        return sum(e.microseconds for e in self.entries)

    @property
    def compiled_bytes(self) -> float | None:
        """That a device receives in the collectives that shardops ops have in the compiled program.

        Each counted once, in a loop too. None where nothing was compiled.
        """
        if self.collectives is None:
            return None
        return sum(hlo.received_bytes(c) for c in self.collectives if _ours(c))

    @property
    def other_collectives(self) -> tuple[hlo.Collective, ...]:
        """Collectives of the compiled program that no shardops op asked for."""
        return tuple(c for c in self.collectives or () if not _ours(c))

    def __str__(self) -> str:
        from shardops.explaining.text import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        return self.to_rich()

    def to_rich(self) -> Any:
        """Tables for `rich.print`. Raises ImportError where rich is not installed."""
        from shardops.explaining.table import as_table

        return as_table(self)

    def to_html(self) -> str:
        """One HTML page that needs no other file, with a drawing of each array's blocks."""
        from shardops.explaining.page import as_page

        return as_page(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: lists, dicts, strings and numbers, as for json.dumps."""
        from shardops.explaining.data import as_dict

        return as_dict(self)


def entries_of(
    record: Record, link: Link, *, compare: bool = False, letters: tuple[Dims, Dims] | None = None
) -> tuple[Entry, ...]:
    """A record with its reason and suggestion, and what plain XLA would do; a product's gradient
    as its two products. On one device there is nothing to suggest or compare."""
    found, placed = [], record.route != "alone"
    for part in parts(record):
        one = part.record
        named = names(one.op, one.shapes, part.gradient, letters)
        found.append(
            Entry(
                one,
                named,
                link,
                reason(one, named),
                # A gradient's layouts follow from the forward's: there is nothing to choose.
                suggestion(one, named) if placed and not part.gradient else None,
                plain(one) if placed and compare and isinstance(one.op, GemmOp) else None,
                part.gradient,
            )
        )
    return tuple(found)


def mesh_sizes(entries: Iterable[Entry]) -> dict[str, int]:
    """All mesh axes that the ops were placed on."""
    return {axis: n for e in entries for axis, n in e.record.sizes}


def _ours(collective: hlo.Collective) -> bool:
    return "shardops." in hlo.asked_by(collective)
