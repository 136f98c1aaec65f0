"""Quantisation and the largest magnitude of an array as ops: placement, local share, vmap rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardops import routing
from shardops.moving import carry_out, in_mesh_order
from shardops.op import Arrays, Call, Inner, Placement, Shapes, Wanted, with_new_dim
from shardops.primitives.quantize_local import Form, local_magnitudes, local_quantize
from shardops.primitives.scaling import magnitude_of
from shardops.rules.quantize import Blocks, QuantizePlan, plan_quantize
from shardops.rules.spec import Axes, Spec

Names = list[str]
Factors = tuple[list[Names], list[Names]]


@dataclass(frozen=True)
class QuantizeOp:
    """Operands: x, [scale_inv]. Results: those of `form.results`."""

    form: Form
    kernel: bool

    @property
    def scope(self) -> str:
        return "shardops.quantize"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("x", *("scale_inv",) * self.form.given)

    def place(self, call: Call) -> Placement:
        # Where the results are wanted does not count: 8-bit data are cheaper to move than x.
        form = self.form
        plan = plan_quantize(call.shapes[0], call.specs[0], call.sizes, form.blocks, int(form.amax))
        steps = (*plan.row_steps, *plan.column_steps, *plan.amax_steps)
        operands = (plan.x, *(plan.amax,) * form.given)
        return Placement(operands, result_specs(form, plan), plan, steps)

    def factors(self, shapes: Shapes) -> Factors:
        x = [f"d{i}" for i in range(len(shapes[0]))]
        operands = [x, *[x[: self.form.blocks.added]] * self.form.given]
        return operands, result_factors(self.form, shapes[0], x)

    def result_shapes(self, shapes: Shapes) -> Shapes:
        """For reports: scales have as many entries as there are blocks."""
        return result_shapes(self.form, shapes[0])

    def local(
        self, plan: QuantizePlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        if plan is None:
            return local_quantize(*arrays, form=self.form, kernel=self.kernel)
        return departed(self.form, plan, inner(self, *arrays))

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """Each entry along the new dim has scales of its own."""
        del wanted
        every = with_new_dim(size, batched, arrays)
        return routing.run(replace(self, form=with_added(self.form)), every, ())


@dataclass(frozen=True)
class MagnitudesOp:
    """Operand x [*added, *rest]. Result [*added, 2]: the largest magnitude, and the finite one."""

    kernel: bool
    added: int = 0

    @property
    def scope(self) -> str:
        return "shardops.quantize"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("x",)

    def place(self, call: Call) -> Placement:
        blocks = Blocks("rows", None, self.added)
        plan = plan_quantize(call.shapes[0], call.specs[0], call.sizes, blocks, 2)
        return Placement((plan.x,), ((*plan.amax, ()),), plan, plan.amax_steps)

    def factors(self, shapes: Shapes) -> Factors:
        x = [f"d{i}" for i in range(len(shapes[0]))]
        return [x], [[*x[: self.added], "two"]]

    def result_shapes(self, shapes: Shapes) -> Shapes:
        """For reports."""
        return ((*shapes[0][: self.added], 2),)

    def local(
        self, plan: QuantizePlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        if plan is None:
            return local_magnitudes(*arrays, added=self.added, kernel=self.kernel)
        (both,) = inner(self, *arrays)
        return (maximum_over(both, plan.amax_axes),)

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        del size, batched, wanted
        return routing.run(replace(self, added=self.added + 1), arrays, ())


def with_added(form: Form) -> Form:
    """The form of an array with one more dim in front, each entry with scales of its own."""
    return replace(form, blocks=replace(form.blocks, added=form.blocks.added + 1))


def result_specs(form: Form, plan: QuantizePlan) -> tuple[Spec, ...]:
    """Where the results lie."""
    specs = {
        "data": plan.rows,
        "scales": plan.x,
        "transposed data": plan.columns,
        "transposed scales": form.blocks.turned(plan.x),
        "amax": plan.amax,
    }
    return tuple(specs[name] for name in form.results)


def result_shapes(form: Form, shape: tuple[int, ...]) -> Shapes:
    """Of the results."""
    blocks, scales = form.blocks, form.blocks.scale_shapes(shape)
    shapes = {
        "data": shape,
        "scales": scales[0] if scales else (),
        "transposed data": blocks.turned(shape),
        "transposed scales": scales[-1] if scales else (),
        "amax": shape[: blocks.added],
    }
    return tuple(shapes[name] for name in form.results)


def result_factors(form: Form, shape: Sequence[int], x: Names) -> list[Names]:
    """Factor names of the results, from those of x.

    A dim of scales has the factor of its dim of x, for what lies along it, where blocks are whole.
    """
    blocks, rank = form.blocks, len(shape)
    scales = [list(x), list(blocks.turned(x))]
    units = blocks.of_rows(rank) or (1,) * rank, blocks.of_columns(rank) or (1,) * rank
    lengths = tuple(shape), blocks.turned(tuple(shape))
    for names, sizes, unit, prefix in zip(scales, lengths, units, "st", strict=True):
        for d, (n, u) in enumerate(zip(sizes, unit, strict=True)):
            if n % u:
                names[d] = f"{prefix}{d}"
    factors = {
        "data": list(x),
        "scales": scales[0],
        "transposed data": list(blocks.turned(x)),
        "transposed scales": scales[1],
        "amax": list(x[: blocks.added]),
    }
    return [factors[name] for name in form.results]


def departed(form: Form, plan: QuantizePlan, results: Arrays) -> tuple[jax.Array, ...]:
    """Results of one device, taken to where the plan wants them."""
    ways: dict[str, Any] = {
        "data": lambda a: carry_out(a, plan.row_steps),
        "transposed data": lambda a: carry_out(a, plan.column_steps),
        "amax": lambda a: maximum_over(a, plan.amax_axes),
    }
    named = zip(form.results, results, strict=True)
    return tuple(ways[name](a) if name in ways else a for name, a in named)


def maximum_over(x: jax.Array, axes: Axes) -> jax.Array:
    """The largest of numbers >= 0 over the mesh, by their bits as in `largest`."""
    if not axes:
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return magnitude_of(jax.lax.pmax(bits, in_mesh_order(axes)))
