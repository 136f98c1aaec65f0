"""The product of quantised operands as an op: scales lie and move as their operand does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardops import routing
from shardops.kernels.gemm_scaled_plan import ScaledPlan
from shardops.op import Arrays, AxisSizes, Call, Inner, Placement, Shapes, Wanted
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled_local import (
    Scaled,
    dequantized,
    local_plan,
    local_scaled_gemm,
)
from shardops.primitives.scaled import ScaledArray, ScalingMode
from shardops.rules.gemm_dims import GemmPlan
from shardops.rules.scales import scale_spec
from shardops.rules.shardy import gemm_factors
from shardops.rules.spec import Spec

Operand = jax.Array | ScaledArray


@dataclass(frozen=True)
class ScaledGemmOp:
    """Operands: lhs, [its scales], rhs, [its scales], then those of `product`; its results."""

    product: GemmOp
    lhs: Scaled | None
    rhs: Scaled | None

    @property
    def scope(self) -> str:
        return self.product.scope

    @property
    def kernel(self) -> bool:
        return self.product.kernel

    @property
    def operands(self) -> tuple[str, ...]:
        lhs, rhs, *rest = self.product.operands
        return (
            lhs,
            *("lhs scales",) * (self.lhs is not None),
            rhs,
            *("rhs scales",) * (self.rhs is not None),
            *rest,
        )

    def local_plan(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], arch: str
    ) -> ScaledPlan:
        """How one device's share runs on a GPU; `shapes` and `dtypes` of lhs and rhs there."""
        product = self.product
        sides = (self.lhs, self.rhs)
        return local_plan(sides, shapes, dtypes, product.contracting, product.batch, arch)

    def sides(self, each: Sequence[Any]) -> tuple[list[Any], list[Any], Sequence[Any]]:
        """What belongs to lhs (data, scales), to rhs, and to the other operands."""
        n = 1 + (self.lhs is not None)
        m = n + 1 + (self.rhs is not None)
        return list(each[:n]), list(each[n:m]), each[m:]

    def place(self, call: Call) -> Placement:
        lhs, rhs, others = self.sides(call.shapes)
        lhs_spec, rhs_spec, specs = self.sides(call.specs)
        of_lhs, of_rhs, itemsizes = self.sides(call.itemsizes)
        product = Call(
            (lhs[0], rhs[0], *others),
            (lhs_spec[0], rhs_spec[0], *specs),
            call.sizes,
            call.wanted,
            (of_lhs[0], of_rhs[0], *itemsizes),
        )
        blocks = (self.lhs and self.lhs.block, self.rhs and self.rhs.block)
        placed = self.product.place(product, blocks)
        of_data = placed.operands
        return Placement(
            (
                *scales_beside(self.lhs, lhs[0], of_data[0], call.sizes),
                *scales_beside(self.rhs, rhs[0], of_data[1], call.sizes),
                *of_data[2:],
            ),
            placed.results,
            placed.plan,
            placed.steps,
            unreduced=placed.unreduced,
        )

    def factors(self, shapes: Shapes) -> tuple[list[list[str]], list[list[str]]]:
        lhs, rhs, _ = self.sides(shapes)
        dims = self.product.dims((lhs[0], rhs[0]))
        product = self.product
        (x, w, *rest), results = gemm_factors(
            dims, bias=product.bias, add=product.add, results=1 + product.save
        )
        of_lhs, of_rhs = loops_of_scales("x", lhs[1:]), loops_of_scales("w", rhs[1:])
        return [x, *of_lhs, w, *of_rhs, *rest], results

    def local(self, plan: GemmPlan | None, arrays: Arrays, inner: Inner) -> tuple[jax.Array, ...]:
        product = self.product
        if plan is None:
            statics = {"lhs": self.lhs, "rhs": self.rhs, "precise": product.precise}
            return product.on_device(local_scaled_gemm, arrays, **statics)
        lhs, rhs, rest = self.sides(arrays)

        def scaled(op: Any, *given: jax.Array) -> tuple[jax.Array, ...]:
            return inner(replace(self, product=op), *lhs, *rhs, *given[2:])

        return product.local(plan, (lhs[0], rhs[0], *rest), scaled)

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """Dequantised first where it is a quantised operand that has the new dim: a new dim of
        one operand's scales is no loop of the product."""
        del size
        parts, flags = self.sides(arrays), self.sides(batched)
        sides = ((self.lhs, flags[0]), (self.rhs, flags[1]))
        if not any(side is not None and any(new) for side, new in sides):
            (lhs, *of_lhs), (rhs, *of_rhs), rest = parts

            def run(op: GemmOp, given: Arrays, asked: Wanted) -> tuple[jax.Array, ...]:
                arrays = (given[0], *of_lhs, given[1], *of_rhs, *given[2:])
                return routing.run(replace(self, product=op), arrays, asked)

            by = (flags[0][0], flags[1][0], *flags[2])
            return self.product.vmapped(0, by, (lhs, rhs, *rest), wanted, run)
        both, by = [], []
        for side, given, new in ((self.lhs, parts[0], flags[0]), (self.rhs, parts[1], flags[1])):
            axes = [0 if b else None for b in new]
            whole = (
                jax.vmap(lambda *a, side=side: dequantized(side, a), axes)(*given)
                if any(new)
                else dequantized(side, given)
            )
            both.append(whole)
            by.append(any(new))
        return self.product.vmapped(0, (*by, *flags[2]), (*both, *parts[2]), wanted)


def product_with(op: GemmOp, lhs: Scaled | None, rhs: Scaled | None) -> GemmOp | ScaledGemmOp:
    """The product of operands of which these are quantised."""
    return op if lhs is rhs is None else ScaledGemmOp(op, lhs, rhs)


def scales_beside(
    side: Scaled | None, shape: tuple[int, ...], spec: Spec, sizes: AxisSizes
) -> list[Spec]:
    """Where data and scales of an operand lie."""
    return [spec] if side is None else [spec, scale_spec(shape, spec, side.block, dict(sizes))]


def loops_of_scales(letter: str, scales: Iterable[tuple[int, ...]]) -> list[list[str]]:
    """Factors for Shardy: scales count blocks, so that their dims are loops of their own."""
    return [[f"{letter}{d}" for d in range(len(shape))] for shape in scales]


# ---- operands ------------------------------------------------------------------------------------


def along_contraction(op: GemmOp, lhs: Any, rhs: Any) -> tuple[GemmOp, Any, Any]:
    """The product with of each ScaledArray the part whose last dim is contracted, where it has it.

    The part with the last dim in front serves a product that contracts the last of the others and
    keeps the order of the free dims: there the last dim is the only free one.
    """
    sides = []
    for i, operand in enumerate((lhs, rhs)):
        contracting, batch, like = op.contracting[i], op.batch[i], op.batch_like[i]
        if isinstance(operand, ScaledArray):
            last = operand.ndim - 1
            part = operand.transposed
            if (
                part is not None
                and {*contracting, *batch} == {*range(last)}
                and (last and last - 1 in contracting)
            ):
                operand = part
                contracting, batch, like = (
                    tuple((d + 1) % (last + 1) for d in dims) for dims in (contracting, batch, like)
                )
            else:
                operand = operand.upright()
            operand = replace(operand, amax=None, transposed_data=None, transposed_scale_inv=None)
        sides.append((operand, contracting, batch, like))
    (lhs, *of_lhs), (rhs, *of_rhs) = sides
    contracting, batch, like = zip(of_lhs, of_rhs, strict=True)
    return replace(op, contracting=contracting, batch=batch, batch_like=like), lhs, rhs


def unwrapped(operand: Any) -> Any:
    """A ScaledArray without scales as the array that it holds."""
    if isinstance(operand, ScaledArray) and operand.mode is ScalingMode.NONE:
        return operand.upright().data
    return operand


def arrays_of(operand: Operand) -> list[jax.Array]:
    """The array, or data and scales."""
    if not isinstance(operand, ScaledArray):
        return [jnp.asarray(operand)]
    return [jnp.asarray(a) for a in (operand.data, operand.scale_inv) if a is not None]


def matched(*operands: Any) -> list[Any]:
    """Operands of which all arrays vary over the same manual axes."""
    leaves, tree = jax.tree.flatten(operands)
    return list(jax.tree.unflatten(tree, routing.match_varying(*leaves)))


def target_of(operand: Operand) -> jax.Array | None:
    """What its cotangent looks like, and goes to; None of a constant."""
    return operand.straight if isinstance(operand, ScaledArray) else operand


def cotangent_of(operand: Operand, to_target: Any) -> Any:
    """The cotangent of an operand, for that of its target."""
    if to_target is None or not isinstance(operand, ScaledArray):
        return to_target
    nothing = jax.tree.map(lambda _: None, operand)
    return replace(nothing, straight=to_target)
