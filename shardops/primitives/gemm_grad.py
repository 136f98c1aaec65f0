"""The gradient of a product: two products that share the cotangent, planned together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardops import array_type, config, routing
from shardops.moving import carry_out
from shardops.op import (
    Arrays,
    Call,
    Inner,
    Placement,
    Shapes,
    Wanted,
    with_derivative,
)
from shardops.primitives.gemm_op import GemmOp
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
    """Operands: dz, lhs, rhs. Results: `to_lhs` of (dz, rhs) and `to_rhs` of (lhs, dz)."""

    name: str
    to_lhs: GemmOp
    to_rhs: GemmOp
    product: GemmOp  # whose gradient it is
    kernel: bool

    @property
    def scope(self) -> str:
        return f"shardops.{self.name}.grad"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("dz", "lhs", "rhs")

    def place(self, call: Call) -> Placement:
        plan = self._plan(call)
        steps = tuple(replace(s, array="dz") for way in plan.of_dz for s in way) + tuple(
            replace(s, array=name)
            for name, p in (("dlhs", plan.to_lhs), ("drhs", plan.to_rhs))
            for s in p.of("out")
        )
        return Placement(
            (plan.dz, plan.to_rhs.lhs, plan.to_lhs.rhs),
            (plan.to_lhs.out, plan.to_rhs.out),
            plan,
            steps,
            unreduced=(plan.to_lhs.unreduced, plan.to_rhs.unreduced),
        )

    def _plan(self, call: Call) -> GemmGradPlan:
        """Either product first; the other one has dz wherever the first moves it to."""
        (z, x, w), (dz, lhs, rhs), (of_z, of_x, of_w) = call.shapes, call.specs, call.itemsizes
        sizes, wanted = call.sizes, call.wanted or (None, None)

        whole = bool(self.to_lhs.unreduced or self.to_rhs.unreduced)

        def to_lhs(**also: Any) -> GemmPlan:
            bytes_each, also = (of_z, of_w), {"whole": whole, **also}
            return self.to_lhs.plan((z, w), (dz, rhs), sizes, wanted[0], bytes_each, **also)

        def to_rhs(**also: Any) -> GemmPlan:
            bytes_each, also = (of_x, of_z), {"whole": whole, **also}
            return self.to_rhs.plan((x, z), (lhs, dz), sizes, wanted[1], bytes_each, **also)

        a, b, dz = to_lhs(), to_rhs(), divisible(z, dz, sizes)
        plans = (
            GemmGradPlan(a, to_rhs(rhs_also=_stops(a.of("lhs"))), True, dz),
            GemmGradPlan(to_lhs(lhs_also=_stops(b.of("rhs"))), b, False, dz),
        )
        return min(plans, key=lambda p: p.seconds)

    def factors(self, shapes: Shapes) -> tuple[list[list[str]], list[list[str]]]:
        dims = self.product.dims(shapes[1:])
        (lhs, rhs), (dz,) = gemm_factors(dims, bias=False, add=False, results=1)
        lhs_order, rhs_order = orders(dims)
        return [dz, lhs, rhs], [[lhs[d] for d in lhs_order], [rhs[d] for d in rhs_order]]

    def local(
        self, plan: GemmGradPlan | None, arrays: Arrays, inner: Inner
    ) -> tuple[jax.Array, ...]:
        dz, lhs, rhs = arrays
        if plan is None:
            return (
                *self.to_lhs.local(None, (dz, rhs), inner),
                *self.to_rhs.local(None, (lhs, dz), inner),
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
            *self.to_lhs.local(plan.to_lhs, (by_lhs, rhs), inner),
            *self.to_rhs.local(plan.to_rhs, (lhs, by_rhs), inner),
        )

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """The two products apart, each with its own new dim."""
        (dz, lhs, rhs), (by_z, by_lhs, by_rhs) = arrays, batched
        asked = wanted or (None, None)
        results = []
        for op, flags, operands, want in (
            (self.to_lhs, (by_z, by_rhs), (dz, rhs), asked[0]),
            (self.to_rhs, (by_lhs, by_z), (lhs, dz), asked[1]),
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


def gradient_of(op: GemmOp, lhs: jax.Array, rhs: jax.Array) -> GemmGradOp:
    """The op that pulls a cotangent dz [batch, lhs free, rhs free] back to both operands.

    to_lhs: [batch, lhs free, contracted in the order of rhs's dims];
    to_rhs: [batch, contracted in the order of lhs's dims, rhs free].
    """
    d = op.dims((lhs.shape, rhs.shape))
    batch, n_lhs = len(d.lhs_batch), len(d.lhs_free)
    z_batch = tuple(range(batch))
    z_lhs = tuple(range(batch, batch + n_lhs))
    z_rhs = tuple(range(batch + n_lhs, batch + n_lhs + len(d.rhs_free)))
    product = replace(op.bare, unreduced=())
    plain = replace(
        product,
        cheapest=False,
        out_dtype=lhs.dtype.name,
        kernel=config.runs_as_kernel(f"{op.name}.grad"),
    )
    to_lhs = replace(
        plain,
        contracting=(z_rhs, d.rhs_free),
        batch=(z_batch, d.rhs_batch),
        batch_like=(d.out_batch_like, d.rhs_batch_like),
        unreduced=array_type.deferred_axes(lhs),
    )
    to_rhs = replace(
        plain,
        contracting=(d.lhs_free, z_lhs),
        batch=(d.lhs_batch, z_batch),
        batch_like=(d.lhs_batch_like, d.out_batch_like),
        unreduced=array_type.deferred_axes(rhs),
    )
    return GemmGradOp(op.name, to_lhs, to_rhs, product, plain.kernel)


def operand_cotangents(
    op: GemmOp, lhs: jax.Array, rhs: jax.Array, dz: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of both operands, laid out as they are."""
    gradient = gradient_of(op, lhs, rhs)
    lhs_order, rhs_order = orders(op.dims((lhs.shape, rhs.shape)))
    wanted = (_wanted(lhs, lhs_order), _wanted(rhs, rhs_order))
    dlhs, drhs = _pull(gradient, wanted, *routing.match_varying(dz, lhs, rhs))
    return _reordered(dlhs, lhs_order, lhs), _reordered(drhs, rhs_order, rhs)


@with_derivative
def _pull(op: GemmGradOp, wanted: Wanted, dz: Any, lhs: Any, rhs: Any) -> Any:
    """(dlhs, drhs). Its own derivative is that of the two products apart."""
    return routing.run(op, (dz, lhs, rhs), wanted)


def _save(op: GemmGradOp, wanted: Wanted, dz: Any, lhs: Any, rhs: Any) -> Any:
    return _pull(op, wanted, dz, lhs, rhs), (dz, lhs, rhs)


def _pull_back(op: GemmGradOp, wanted: Wanted, saved: Any, cotangents: Any) -> Any:
    from shardops.primitives.gemm import product_of  # which imports this file

    def apart(dz: Any, lhs: Any, rhs: Any) -> Any:
        return (
            product_of(op.to_lhs, wanted[0], dz, rhs),
            product_of(op.to_rhs, wanted[1], lhs, dz),
        )

    return routing.pull(apart, saved, cotangents)


_pull.defvjp(_save, _pull_back)


def _wanted(like: jax.Array, order: Dims) -> Spec | None:
    """The sharding in the type of `like`, its dims in another order."""
    spec = array_type.explicit_spec(like)
    return None if spec is None else tuple(spec[dim] for dim in order)


def _reordered(out: jax.Array, order: Dims, like: jax.Array) -> jax.Array:
    """An array whose p-th dim is dim `order[p]` of `like`, with the dims and the type of `like`."""
    inverse = sorted(range(len(order)), key=lambda p: order[p])
    return array_type.Type.of(like).apply(jnp.transpose(out, inverse))
