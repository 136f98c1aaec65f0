"""The gradient of a product as an op: two products that share the cotangent, planned together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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

    @property
    def of_dz(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The moves of dz for either product."""
        return self.to_lhs.of("lhs"), self.to_rhs.of("rhs")

    @property
    def seconds(self) -> float:
        """Time on the links and in the products, as the search counts it."""
        return seconds(self.to_lhs) + seconds(self.to_rhs)


@dataclass(frozen=True)
class GemmGradOp:
    """Operands: dz, lhs, [its scales], rhs, [its scales].

    Results: `to_lhs` of (dz, rhs) and `to_rhs` of (lhs, dz).
    """

    name: str
    to_lhs: GemmOp
    to_rhs: GemmOp
    product: GemmOp  # whose gradient it is
    kernel: bool
    lhs: Scaled | None = None
    rhs: Scaled | None = None

    @property
    def scope(self) -> str:
        return f"shardops.{self.name}.grad"

    @property
    def operands(self) -> tuple[str, ...]:
        lhs_scales, rhs_scales = self.lhs is not None, self.rhs is not None
        return ("dz", "lhs", *("lhs scales",) * lhs_scales, "rhs", *("rhs scales",) * rhs_scales)

    @property
    def products(self) -> tuple[GemmOp | ScaledGemmOp, GemmOp | ScaledGemmOp]:
        """Both, with what is static of the quantised operands."""
        return product_with(self.to_lhs, None, self.rhs), product_with(self.to_rhs, self.lhs, None)

    def sides(self, each: Sequence[Any]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """What belongs to dz, to lhs (data, scales), to rhs."""
        n = 2 + (self.lhs is not None)
        return each[0], tuple(each[1:n]), tuple(each[n:])

    def place(self, call: Call) -> Placement:
        plan = self._plan(call)
        _, (lhs, *_), (rhs, *_) = self.sides(call.shapes)
        steps = tuple(replace(s, array="dz") for way in plan.of_dz for s in way) + tuple(
            replace(s, array=name)
            for name, p in (("dlhs", plan.to_lhs), ("drhs", plan.to_rhs))
            for s in p.of("out")
        )
        return Placement(
            (
                plan.dz,
                *scales_beside(self.lhs, lhs, plan.to_rhs.lhs, call.sizes),
                *scales_beside(self.rhs, rhs, plan.to_lhs.rhs, call.sizes),
            ),
            (plan.to_lhs.out, plan.to_rhs.out),
            plan,
            steps,
            unreduced=(plan.to_lhs.unreduced, plan.to_rhs.unreduced),
        )

    def _plan(self, call: Call) -> GemmGradPlan:
        """Either product first; the other one has dz wherever the first moves it to."""
        z, (x, *_), (w, *_) = self.sides(call.shapes)
        dz, (lhs, *_), (rhs, *_) = self.sides(call.specs)
        of_z, (of_x, *_), (of_w, *_) = self.sides(call.itemsizes)
        sizes, wanted = call.sizes, call.wanted or (None, None)
        of_lhs, of_rhs = (None if s is None else s.block for s in (self.lhs, self.rhs))

        whole = bool(self.to_lhs.unreduced or self.to_rhs.unreduced)

        def to_lhs(**also: Any) -> GemmPlan:
            bytes_each, also = (of_z, of_w), {"blocks": (None, of_rhs), "whole": whole, **also}
            return self.to_lhs.plan((z, w), (dz, rhs), sizes, wanted[0], bytes_each, **also)

        def to_rhs(**also: Any) -> GemmPlan:
            bytes_each, also = (of_x, of_z), {"blocks": (of_lhs, None), "whole": whole, **also}
            return self.to_rhs.plan((x, z), (lhs, dz), sizes, wanted[1], bytes_each, **also)

        a, b, dz = to_lhs(), to_rhs(), divisible(z, dz, sizes)
        plans = (
            GemmGradPlan(a, to_rhs(rhs_also=_stops(a.of("lhs"))), True, dz),
            GemmGradPlan(to_lhs(lhs_also=_stops(b.of("rhs"))), b, False, dz),
        )
        return min(plans, key=lambda p: p.seconds)

    def factors(self, shapes: Shapes) -> tuple[list[list[str]], list[list[str]]]:
        _, (of_lhs, *lhs_scales), (of_rhs, *rhs_scales) = self.sides(shapes)
        dims = self.product.dims((of_lhs, of_rhs))
        (lhs, rhs), (dz,) = gemm_factors(dims, bias=False, add=False, results=1)
        lhs_order, rhs_order = orders(dims)
        scaled = loops_of_scales("x", lhs_scales), loops_of_scales("w", rhs_scales)
        results = [[lhs[d] for d in lhs_order], [rhs[d] for d in rhs_order]]
        return [dz, lhs, *scaled[0], rhs, *scaled[1]], results

    def local(
        self, plan: GemmGradPlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        dz, lhs, rhs = self.sides(arrays)
        to_lhs, to_rhs = self.products
        if plan is None:
            return (
                *to_lhs.local(None, (dz, *rhs), inner),
                *to_rhs.local(None, (*lhs, dz), inner),
            )
        ways = plan.of_dz if plan.lhs_first else plan.of_dz[::-1]
        first, stops = dz, {plan.dz: dz}
        for step in ways[0]:
            stops[step.after] = first = carry_out(first, [step])
        # Where no step follows, the second product takes dz as it lies in its plan.
        need = plan.to_rhs.rhs if plan.lhs_first else plan.to_lhs.lhs
        start = ways[1][0].before if ways[1] else need
        second = carry_out(stops[start], ways[1])
        by_lhs, by_rhs = (first, second) if plan.lhs_first else (second, first)
        return (
            *to_lhs.local(plan.to_lhs, (by_lhs, *rhs), inner),
            *to_rhs.local(plan.to_rhs, (*lhs, by_rhs), inner),
        )

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """The two products apart, each with its own new dim."""
        (dz, lhs, rhs), (by_z, by_lhs, by_rhs) = self.sides(arrays), self.sides(batched)
        asked, (to_lhs, to_rhs) = wanted or (None, None), self.products
        results = []
        for op, flags, operands, want in (
            (to_lhs, (by_z, *by_rhs), (dz, *rhs), asked[0]),
            (to_rhs, (*by_lhs, by_z), (*lhs, dz), asked[1]),
        ):
            if any(flags):
                results += op.vmapped(size, flags, operands, (want,))
            else:
                (one,) = routing.run(op, operands, (want,))
                results.append(jnp.broadcast_to(one[None], (size, *one.shape)))
        return tuple(results)


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
