"""Forward and backward of the norms as ops: placement, local share, vmap rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardops import array_type, routing
from shardops.moving import carry_out
from shardops.op import Arrays, Call, Inner, Placement, Shapes, Wanted, with_new_dim
from shardops.primitives.norm_local import (
    Kind,
    Pulled,
    backward_reference,
    forward_reference,
    local_backward,
    local_forward,
)
from shardops.primitives.quantize_local import Form
from shardops.primitives.quantize_op import departed, result_factors, result_specs, with_added
from shardops.rules.quantize import QuantisedRows, plan_quantised_rows
from shardops.rules.rowwise import RowwiseCall, RowwisePlan, Stats, plan_rowwise
from shardops.rules.spec import Axes, Spec, among
from shardops.rules.step import Step

Factors = tuple[list[list[str]], list[list[str]]]


@dataclass(frozen=True)
class NormForward:
    """Operands: x, gamma, [beta], [add]. Results: y, [h], [mean], rstd; mean for LayerNorm only.

    With a `form` y is quantised: what stands for it are the results of that, and where one scale
    serves it that scale is the last operand.
    """

    kind: Kind
    beta: bool
    add: bool
    epsilon: float
    zero_centered_gamma: bool
    stats: Stats
    kernel: bool
    form: Form | None = None
    wide: bool = False  # y in float32, not in the dtype of x
    pulled: Pulled | None = None

    @property
    def scope(self) -> str:
        return f"shardops.{self.kind}_norm"

    @property
    def operands(self) -> tuple[str, ...]:
        scale = self.form is not None and self.form.given
        names = ("x", "gamma", *("beta",) * self.beta, *("add",) * self.add)
        return (*names, *("scale_inv",) * scale)

    def place(self, call: Call) -> Placement:
        row_like = (0, *(2 + self.beta,) * self.add)
        itemsizes = tuple(call.itemsizes[n] for n in row_like)
        rowwise = RowwiseCall(
            call.shapes[0],
            itemsizes,
            (4 if self.wide else 1 if self.form else itemsizes[0], *itemsizes[1:]),
            sums=(1, 1) if self.kind == "layer" else (1,),
        )
        offered = tuple(call.specs[n] for n in row_like)
        statistics = 2 if self.kind == "layer" else 1
        if self.form is not None:
            written = len(self.form.results)
            h = call.wanted[written : written + self.add]
            plan = plan_quantised_rows(
                rowwise,
                offered,
                call.sizes,
                self.stats,
                (None, *h),
                self.form.blocks,
                int(self.form.amax),
            )
            given = (plan.written.amax,) * self.form.given
            operands = (*self._placed(plan.rowwise), *given)
            results = (*result_specs(self.form, plan.written), *plan.rowwise.results[1:])
            return Placement(
                operands, (*results, *(plan.rowwise.rows,) * statistics), plan, plan.steps
            )
        plan = plan_rowwise(rowwise, offered, call.sizes, self.stats, call.wanted[: 1 + self.add])
        results = (*plan.results, *(plan.rows,) * statistics)
        return Placement(self._placed(plan), results, plan, plan.steps)

    def _placed(self, plan: RowwisePlan) -> tuple[Spec, ...]:
        return (plan.x, plan.gamma, *(plan.gamma,) * self.beta, *(plan.x,) * self.add)

    def factors(self, shapes: Shapes) -> Factors:
        # gamma and beta have factors of their own: where they lie must not decide where x does.
        rows = [f"r{i}" for i in range(len(shapes[0]) - 1)]
        x = [*rows, "h"]
        y = [*rows, "o"] if self.stats == "gather" else x
        operands = [x, ["g"], *[["b"]] * self.beta, *[x] * self.add]
        written = [y]
        if self.form is not None:
            operands += [rows[: self.form.blocks.added]] * self.form.given
            written = result_factors(self.form, shapes[0], y)
        return operands, [*written, *[y] * self.add, *[rows] * (self.kind == "layer"), rows]

    def unpack(
        self, results: Sequence[jax.Array], x: jax.Array
    ) -> tuple[list[jax.Array], Any, Any, Any]:
        """What stands for y, h, mean or None, rstd."""
        rest = iter(results)
        written = [next(rest) for _ in (self.form.results if self.form else "y")]
        h = next(rest) if self.add else x
        mean = next(rest) if self.kind == "layer" else None
        return written, h, mean, next(rest)

    def local(
        self, plan: RowwisePlan | QuantisedRows | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        if plan is None:
            return local_forward(*arrays, kernel=self.kernel, **self._statics)
        rowwise = plan.rowwise if isinstance(plan, QuantisedRows) else plan
        if rowwise.hidden:  # the reference, between the sums that combine its statistics
            results = forward_reference(*arrays, **self._statics, axes=rowwise.hidden)
        else:
            results = inner(self, *arrays)
        if self.form is None or not isinstance(plan, QuantisedRows):
            return depart(rowwise.departures, results)
        n = len(self.form.results)
        written = departed(self.form, plan.written, results[:n])
        return (*written, *depart(rowwise.departures[1:], results[n:]))

    def reference(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The op in plain jnp, its operands laid out alike first: Explicit axes want that.

        Of a quantised y the last result is y itself, which has the derivative.
        """
        alike = _alike(self, arrays, arrays[0])
        results = forward_reference(*alike, **self._statics)
        if self.form is None:
            return results
        return (*results, forward_reference(*alike, **replace(self, form=None)._statics)[0])

    @property
    def _statics(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "beta": self.beta,
            "add": self.add,
            "epsilon": self.epsilon,
            "zero_centered_gamma": self.zero_centered_gamma,
            "form": self.form,
            "wide": self.wide,
            **({} if self.pulled is None else {"pulled": self.pulled}),
        }

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """A new dim of x is one more row dim. A gamma for each example runs the reference."""
        del wanted
        if any(batched[1 : 2 + self.beta]):

            def one(*arrays: jax.Array) -> tuple[jax.Array, ...]:
                return forward_reference(*_alike(self, arrays, arrays[0]), **self._statics)

            return jax.vmap(one, [0 if b else None for b in batched])(*arrays)
        vectors = range(1, 2 + self.beta)
        rows = with_new_dim(size, [b or n in vectors for n, b in enumerate(batched)], arrays)
        form = None if self.form is None else with_added(self.form)
        return routing.run(replace(self, form=form), rows, ())


@dataclass(frozen=True)
class NormBackward:
    """Operands: dy, h, gamma, [mean], rstd, [dh]. Results: dx, dgamma, [dbeta], these in float32.

    dh is a cotangent of h that joins dx before it is rounded.
    """

    kind: Kind
    beta: bool
    residual: bool
    zero_centered_gamma: bool
    stats: Stats
    kernel: bool
    unreduced: Axes = ()  # axes over which dgamma and dbeta are to stay unreduced

    @property
    def scope(self) -> str:
        return f"shardops.{self.kind}_norm.grad"

    @property
    def operands(self) -> tuple[str, ...]:
        statistics = ("mean", "rstd") if self.kind == "layer" else ("rstd",)
        return ("dy", "h", "gamma", *statistics, *("dh",) * self.residual)

    def place(self, call: Call) -> Placement:
        like_x = (0, 1, *(len(call.shapes) - 1,) * self.residual)
        rowwise = RowwiseCall(
            call.shapes[1],
            tuple(call.itemsizes[n] for n in like_x),
            (call.itemsizes[1],),
            sums=(2,) if self.kind == "layer" else (1,),
            parameters=1 + self.beta,
            unreduced=among(self.unreduced, call.sizes),
            main=1,
        )
        offered = tuple(call.specs[n] for n in like_x)
        plan = plan_rowwise(rowwise, offered, call.sizes, self.stats, (call.want(),), call.want(1))
        return Placement(
            self._operands(plan.x, plan.gamma, plan.rows),
            (*plan.results, *(plan.parameter_out,) * (1 + self.beta)),
            plan,
            plan.steps,
            unreduced=(*((),) * len(plan.results), *(plan.unreduced,) * (1 + self.beta)),
        )

    def factors(self, shapes: Shapes) -> Factors:
        rows = [f"r{i}" for i in range(len(shapes[1]) - 1)]
        x = [*rows, "h"]
        dx = [*rows, "o"] if self.stats == "gather" else x
        # Gradients of parameters lie as gamma does, where nothing else is asked for.
        return list(self._operands(x, ["g"], rows)), [dx, *[["g"]] * (1 + self.beta)]

    def _operands(self, x: Any, gamma: Any, rows: Any) -> tuple[Any, ...]:
        statistics = (rows,) * (2 if self.kind == "layer" else 1)
        return (x, x, gamma, *statistics, *(x,) * self.residual)

    def local(
        self, plan: RowwisePlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        if plan is None:
            return local_backward(*arrays, kernel=self.kernel, **self._statics)
        if plan.hidden:
            dx, *sums = backward_reference(*arrays, **self._statics, axes=plan.hidden)
        else:
            dx, *sums = inner(self, *arrays)
        return (*depart(plan.departures, (dx,)), *_sum_together(sums, plan.parameter_steps))

    def reference(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The op in plain jnp, its operands laid out alike first: Explicit axes want that."""
        return backward_reference(*_alike(self, arrays, arrays[1]), **self._statics)

    @property
    def _statics(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "beta": self.beta,
            "residual": self.residual,
            "zero_centered_gamma": self.zero_centered_gamma,
        }

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """A gradient of gamma for each example: the reference, through XLA."""
        del size, wanted
        return jax.vmap(self.reference, [0 if b else None for b in batched])(*arrays)


def _alike(op: NormForward | NormBackward, arrays: Arrays, x: jax.Array) -> list[jax.Array]:
    """The operands with the sharding of the dims of x that they share."""
    spec = array_type.explicit_spec(x)
    if spec is None:
        return list(arrays)
    operands, _ = op.factors(tuple(a.shape for a in arrays))
    axes = {f"r{i}": d for i, d in enumerate(spec[:-1])} | dict.fromkeys("hgb", spec[-1])
    return [
        array_type.laid_out(a, tuple(axes[name] for name in names))
        for a, names in zip(arrays, operands, strict=True)
    ]


def depart(
    departures: Sequence[Sequence[Step]], results: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Row-shaped results go where they are wanted; what comes after them stays."""
    ways = (*departures, *((),) * (len(results) - len(departures)))
    return tuple(carry_out(r, way) for r, way in zip(results, ways, strict=True))


def _sum_together(sums: list[jax.Array], steps: Sequence[Step]) -> list[jax.Array]:
    """Gradients of gamma and beta in one collective."""
    if not steps or len(sums) == 1:
        return [carry_out(s, steps) for s in sums]
    return list(carry_out(jnp.stack(sums), [_behind(s) for s in steps]))


def _behind(step: Step) -> Step:
    """The step on an array with one more dim in front."""
    return replace(
        step,
        before=((), *step.before),
        after=((), *step.after),
        dim=step.dim + (step.dim >= 0),
        to_dim=step.to_dim + (step.to_dim >= 0),
    )
