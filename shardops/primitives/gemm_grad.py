"""The gradient of a product as an op: two products that share the cotangent, planned together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardops import routing
from shardops.moving import carry_out
from shardops.op import Arrays, Call, Inner, Placement, Shapes, Wanted
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import (
    ScaledGemmOp,
    loops_of_scales,
    product_with,
    scales_beside,
)
from shardops.primitives.gemm_scaled_local import Scaled
from shardops.rules.gemm import seconds
from shardops.rules.gemm_dims import Dims, GemmDims, GemmPlan
from shardops.rules.gemm_search import ROUNDING
from shardops.rules.shardy import gemm_factors
from shardops.rules.spec import Spec, divisible
from shardops.rules.step import Step


@dataclass(frozen=True)
class GemmGradPlan:
    """Plans of both products. Where dz is moved for the first, the second starts from there."""

    to_lhs: GemmPlan
    to_rhs: GemmPlan
    lhs_first: bool
    dz: Spec  # as it is taken
    turned: bool = False  # whether `to_rhs` is of the transposed dz, which moves by itself

    @property
    def of_dz(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The moves of dz for either product."""
        return self.to_lhs.of("lhs"), () if self.turned else self.to_rhs.of("rhs")

    @property
    def seconds(self) -> float:
        """Time on the links and in the products, as the search counts it."""
        return seconds(self.to_lhs) + seconds(self.to_rhs)


class Sides(NamedTuple):
    """What belongs to each array of a gradient: to its data, then to its scales."""

    dz: tuple[Any, ...]
    turned: tuple[Any, ...]  # the transposed dz; () where there is none
    lhs: tuple[Any, ...]
    rhs: tuple[Any, ...]


@dataclass(frozen=True)
class GemmGradOp:
    """Operands: dz, [dz transposed, the scale of both], lhs, [its scales], rhs, [its scales].

    Results: `to_lhs` of (dz, rhs) and `to_rhs` of (lhs, dz), or `turned` of (lhs, dz transposed).
    """

    name: str
    to_lhs: GemmOp
    to_rhs: GemmOp
    product: GemmOp  # whose gradient it is
    kernel: bool
    lhs: Scaled | None = None
    rhs: Scaled | None = None
    dz: Scaled | None = None  # with one scale; it comes in both layouts then
    turned: GemmOp | None = None

    @property
    def scope(self) -> str:
        return f"shardops.{self.name}.grad"

    @property
    def operands(self) -> tuple[str, ...]:
        lhs_scales, rhs_scales = self.lhs is not None, self.rhs is not None
        sides = ("lhs", *("lhs scales",) * lhs_scales, "rhs", *("rhs scales",) * rhs_scales)
        return ("dz", *("transposed dz", "dz scales") * (self.dz is not None), *sides)

    def products(self, turned: bool) -> tuple[GemmOp | ScaledGemmOp, GemmOp | ScaledGemmOp]:
        """Both, with what is static of the quantised operands."""
        to_rhs = self.turned if turned and self.turned is not None else self.to_rhs
        return product_with(self.to_lhs, self.dz, self.rhs), product_with(to_rhs, self.lhs, self.dz)

    def sides(self, each: Sequence[Any]) -> Sides:
        """What belongs to each of the arrays."""
        n = 1 if self.dz is None else 3
        m = n + 1 + (self.lhs is not None)
        dz, transposed, scale = each[0], each[1 : n - 1], each[2:n]
        return Sides((dz, *scale), (*transposed, *scale), tuple(each[n:m]), tuple(each[m:]))

    def place(self, call: Call) -> Placement:
        plan = self._plan(call)
        shapes, specs = self.sides(call.shapes), self.sides(call.specs)
        steps = tuple(replace(s, array="dz") for way in plan.of_dz for s in way) + tuple(
            replace(s, array=name)
            for name, p in (("dlhs", plan.to_lhs), ("drhs", plan.to_rhs))
            for s in p.of("out")
        )
        dz: tuple[Spec, ...] = (plan.dz,)
        if self.dz is not None:
            offered = divisible(shapes.turned[0], specs.turned[0], call.sizes)
            dz = (plan.dz, plan.to_rhs.rhs if plan.turned else offered, ())
        return Placement(
            (
                *dz,
                *scales_beside(self.lhs, shapes.lhs[0], plan.to_rhs.lhs, call.sizes),
                *scales_beside(self.rhs, shapes.rhs[0], plan.to_lhs.rhs, call.sizes),
            ),
            (plan.to_lhs.out, plan.to_rhs.out),
            plan,
            steps,
            unreduced=(plan.to_lhs.unreduced, plan.to_rhs.unreduced),
        )

    def _plan(self, call: Call) -> GemmGradPlan:
        """Either product first; the other one has dz wherever the first moves it to.

        Where that is no cheaper, the transposed dz: it lies as its product wants it.
        """
        shapes, specs, each = map(self.sides, (call.shapes, call.specs, call.itemsizes))
        (z, *_), (x, *_), (w, *_) = shapes.dz, shapes.lhs, shapes.rhs
        dz, lhs, rhs = specs.dz[0], specs.lhs[0], specs.rhs[0]
        sizes, wanted = call.sizes, call.wanted or (None, None)
        of_dz, of_lhs, of_rhs = each.dz[0], each.lhs[0], each.rhs[0]
        x_block, w_block = (None if s is None else s.block for s in (self.lhs, self.rhs))
        whole = bool(self.to_lhs.unreduced or self.to_rhs.unreduced)

        def to_lhs(**also: Any) -> GemmPlan:
            given = (z, w), (dz, rhs), sizes, wanted[0], (of_dz, of_rhs), (None, w_block)
            return self.to_lhs.plan(*given, whole=whole, **also)

        def to_rhs(**also: Any) -> GemmPlan:
            given = (x, z), (lhs, dz), sizes, wanted[1], (of_lhs, of_dz), (x_block, None)
            return self.to_rhs.plan(*given, whole=whole, **also)

        a, b, at = to_lhs(), to_rhs(), divisible(z, dz, sizes)
        plans = (
            GemmGradPlan(a, to_rhs(rhs_also=_stops(a.of("lhs"))), True, at),
            GemmGradPlan(to_lhs(lhs_also=_stops(b.of("rhs"))), b, False, at),
        )
        best = min(plans, key=lambda p: p.seconds)
        if self.turned is None:
            return best
        both, lie = (x, shapes.turned[0]), (lhs, specs.turned[0])
        given = both, lie, sizes, wanted[1], (of_lhs, of_dz), (x_block, None)
        apart = GemmGradPlan(a, self.turned.plan(*given, whole=whole), True, at, turned=True)
        return apart if apart.seconds <= best.seconds * (1 + ROUNDING) else best

    def factors(self, shapes: Shapes) -> tuple[list[list[str]], list[list[str]]]:
        sides = self.sides(shapes)
        (x, *lhs_scales), (w, *rhs_scales) = sides.lhs, sides.rhs
        dims = self.product.dims((x, w))
        (lhs, rhs), _ = gemm_factors(dims, bias=False, add=False, results=1)
        lhs_order, rhs_order = orders(dims)
        results = [[lhs[d] for d in lhs_order], [rhs[d] for d in rhs_order]]
        dz = [_factors_of(self.to_lhs.dims((sides.dz[0], w)), 0, rhs, results[0])]
        if self.turned is not None:
            turned = self.turned.dims((x, sides.turned[0]))
            dz += [_factors_of(turned, 1, lhs, results[1]), []]
        scaled = loops_of_scales("x", lhs_scales), loops_of_scales("w", rhs_scales)
        return [*dz, lhs, *scaled[0], rhs, *scaled[1]], results

    def local(
        self, plan: GemmGradPlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        sides = self.sides(arrays)
        to_lhs, to_rhs = self.products(plan is None or plan.turned)
        if plan is None:
            return (
                *to_lhs.local(None, (*sides.dz, *sides.rhs), inner),
                *to_rhs.local(None, (*sides.lhs, *(sides.turned or sides.dz)), inner),
            )
        (dz, *scale) = sides.dz
        ways = plan.of_dz if plan.lhs_first else plan.of_dz[::-1]
        first, stops = dz, {plan.dz: dz}
        for step in ways[0]:
            stops[step.after] = first = carry_out(first, [step])
        if plan.turned:
            second = sides.turned[0]
        else:
            # Where no step follows, the second product takes dz as it lies in its plan.
            need = plan.to_rhs.rhs if plan.lhs_first else plan.to_lhs.lhs
            start = ways[1][0].before if ways[1] else need
            second = carry_out(stops[start], ways[1])
        by_lhs, by_rhs = (first, second) if plan.lhs_first else (second, first)
        return (
            *to_lhs.local(plan.to_lhs, (by_lhs, *scale, *sides.rhs), inner),
            *to_rhs.local(plan.to_rhs, (*sides.lhs, by_rhs, *scale), inner),
        )

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """The two products apart, each with its own new dim."""
        given, new = self.sides(arrays), self.sides(batched)
        asked, (to_lhs, to_rhs) = wanted or (None, None), self.products(True)
        results = []
        for op, flags, operands, want in (
            (to_lhs, new.dz + new.rhs, given.dz + given.rhs, asked[0]),
            (
                to_rhs,
                new.lhs + (new.turned or new.dz),
                given.lhs + (given.turned or given.dz),
                asked[1],
            ),
        ):
            if any(flags):
                results += op.vmapped(size, flags, operands, (want,))
            else:
                (one,) = routing.run(op, operands, (want,))
                results.append(jnp.broadcast_to(one[None], (size, *one.shape)))
        return tuple(results)


def _factors_of(
    dims: GemmDims, side: int, other: Sequence[str], result: Sequence[str]
) -> list[str]:
    """Factor names of an operand of a product, from those of the other one and of the result."""
    names = {}
    for n, loop in enumerate(dims.loops):
        own, others = loop[side], loop[1 - side]
        if own is not None:
            names[own] = result[n] if others is None else other[others]
    return [names[d] for d in range(len(names))]


def _stops(steps: Sequence[Step]) -> tuple[Spec, ...]:
    return tuple(step.after for step in steps)


def orders(dims: GemmDims) -> tuple[Dims, Dims]:
    """Which dims of lhs and of rhs the dims of the two products are."""
    by_rhs = sorted(range(len(dims.rhs_k)), key=lambda n: dims.rhs_k[n])
    by_lhs = sorted(range(len(dims.lhs_k)), key=lambda n: dims.lhs_k[n])
    return (
        dims.lhs_batch + dims.lhs_free + tuple(dims.lhs_k[n] for n in by_rhs),
        dims.rhs_batch + tuple(dims.rhs_k[n] for n in by_lhs) + dims.rhs_free,
    )
