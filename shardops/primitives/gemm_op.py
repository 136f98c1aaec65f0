"""The product as an op: its placement, its local share, its vmap rule, its reference and kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardops import array_type, routing
from shardops.moving import carry_out
from shardops.op import Arrays, AxisSizes, Call, Inner, Itemsizes, Placement, Shapes, Wanted
from shardops.primitives.gemm_local import DimPair, local_gemm
from shardops.rules.gemm import plan
from shardops.rules.gemm_dims import GemmDims, GemmPlan
from shardops.rules.gemm_finish import Addend, finish_where_cheapest
from shardops.rules.shardy import gemm_factors
from shardops.rules.spec import Axes, Spec, among, divisible

Dims = tuple[int, ...]
Blocks = tuple[Dims | None, Dims | None]
Activation = Literal["gelu", "silu", "relu"]
ACTIVATIONS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu}


@dataclass(frozen=True)
class GemmOp:
    """out = activation(lhs · rhs + add + bias). Operands: lhs, rhs, [bias], [add].

    Results: out, and the pre-activation with `save`.
    """

    name: str
    contracting: DimPair
    batch: DimPair = ((), ())  # true batch dims
    batch_like: DimPair = ((), ())
    bias: bool = False
    add: bool = False
    activation: Activation | None = None
    save: bool = False
    out_dtype: str = "float32"
    precision: Any = None
    cheapest: bool = False
    precise: bool = False
    unreduced: Axes = ()  # axes over which the result is to stay unreduced, where it can
    open_dims: frozenset[int] = frozenset()  # of the result: sharded as the partitioner likes
    kernel: bool = True

    @property
    def scope(self) -> str:
        return f"shardops.{self.name}"

    @property
    def bare(self) -> "GemmOp":
        """The product without what comes after it."""
        return replace(self, bias=False, add=False, activation=None, save=False)

    @property
    def operands(self) -> tuple[str, ...]:
        return ("lhs", "rhs", *("bias",) * self.bias, *("add",) * self.add)

    def dims(self, shapes: Sequence[Sequence[int]]) -> GemmDims:
        """The dims of a product of operands with these shapes."""
        lhs, rhs = shapes[0], shapes[1]
        return GemmDims(tuple(lhs), tuple(rhs), *self.contracting, *self.batch, *self.batch_like)

    def place(self, call: Call, blocks: Blocks = (None, None)) -> Placement:
        # A sharding that the partitioner has chosen stands: another one would be moved to it.
        asked: Spec | Literal["cheapest"] | None = "cheapest" if self.cheapest else None
        for want in call.wanted[::-1]:
            asked = asked if want is None else want

        def plan_to(asked: Spec | Literal["cheapest"] | None) -> GemmPlan:
            return self.plan(call.shapes, call.specs, call.sizes, asked, call.itemsizes, blocks)

        planned = plan_to(asked)
        bias, add = self._addends(call)
        if bias or add:
            shape, size = self.dims(call.shapes).out_shape, jnp.dtype(self.out_dtype).itemsize
            planned = finish_where_cheapest(planned, shape, call.sizes, size, bias, add, plan_to)
        extra = ((planned.bias,) if bias else ()) + ((planned.finished,) if add else ())
        return Placement(
            (planned.lhs, planned.rhs, *extra),
            (planned.out,) * (1 + self.save),
            planned,
            planned.of("out"),
            unreduced=(planned.unreduced, *((),) * self.save),
        )

    def _addends(self, call: Call) -> tuple[Addend | None, Addend | None]:
        """Bias and `add` as they are offered."""
        lying = (
            Addend(shape, divisible(shape, spec, call.sizes), size)
            for shape, spec, size in zip(
                call.shapes[2:], call.specs[2:], call.itemsizes[2:], strict=True
            )
        )
        return (next(lying) if self.bias else None), (next(lying) if self.add else None)

    def plan(
        self,
        shapes: Shapes,
        specs: tuple[Spec, ...],
        sizes: AxisSizes,
        wanted: Spec | Literal["cheapest"] | None,
        itemsizes: Itemsizes,
        blocks: Blocks = (None, None),
        **also: Any,
    ) -> GemmPlan:
        """The plan for operands with these shapes, where they are offered."""
        partial = 4 if self.precise else jnp.dtype(self.out_dtype).itemsize
        bytes_each = (itemsizes[0], itemsizes[1], partial)
        dims = self.dims(shapes)
        deferred = among(self.unreduced, sizes)
        also.setdefault("whole", bool(deferred))  # open sums need types that know no parts of axes
        return plan(dims, *specs[:2], sizes, wanted, *blocks, bytes_each, deferred, **also)

    def factors(self, shapes: Shapes) -> tuple[list[list[str]], list[list[str]]]:
        results = 2 if self.save else 1
        return gemm_factors(self.dims(shapes), bias=self.bias, add=self.add, results=results)

    def local(self, plan: GemmPlan | None, arrays: Arrays, inner: Inner) -> tuple[jax.Array, ...]:
        if plan is None:
            return self.on_device(local_gemm, arrays)
        if not (self.save and plan.after_finish):
            out, *saved = self._finished(plan, arrays, inner)
            return (carry_out(out, plan.after_finish), *saved)
        # The gradient needs the pre-activation where the result is: it goes there for both.
        linear = replace(self, activation=None, save=False)
        (z,) = linear._finished(plan, arrays, inner)
        return self._activate(carry_out(z, plan.after_finish))

    def _finished(self, plan: GemmPlan, arrays: Arrays, inner: Inner) -> tuple[jax.Array, ...]:
        """The results with bias and activation, where these come."""
        if not plan.before_finish:
            return inner(self, *arrays)
        # A sum over the mesh comes first: bias and activation may enter once only.
        sums, moves = plan.summing, plan.before_finish[len(plan.summing) :]
        dtype = "float32" if self.precise and sums else self.out_dtype
        (total,) = inner(replace(self.bare, out_dtype=dtype), *arrays[:2])
        total = carry_out(total, sums)
        if moves:
            total = carry_out(total.astype(self.out_dtype), moves)
        return self._finish(total, *self._optional(arrays))

    def vmapped(
        self,
        size: int,
        batched: Sequence[bool],
        arrays: Arrays,
        wanted: Wanted,
        run: Callable[..., tuple[jax.Array, ...]] = routing.run,
    ) -> tuple[jax.Array, ...]:
        """A new first dim is a free dim of the operand that has it, a true batch dim if both do."""
        del size
        lhs, rhs = arrays[:2]
        by_lhs, by_rhs = batched[:2]
        bias, add = self._optional(arrays)
        bias_batched = self.bias and batched[2]
        n_batch, n_lhs = len(self.batch[0]), lhs.ndim - len(self.contracting[0] + self.batch[0])
        if not (by_lhs or by_rhs) or (bias_batched and by_lhs):
            return self._batch_apart(batched, arrays, wanted[:1], run)
        new = 0 if by_lhs and by_rhs else n_batch if by_lhs else n_batch + n_lhs
        op = replace(
            self,
            contracting=_shift_pair(self.contracting, by_lhs, by_rhs),
            batch=_shift_pair(self.batch, by_lhs, by_rhs),
            batch_like=_shift_pair(self.batch_like, by_lhs, by_rhs),
        )
        if by_lhs and by_rhs:
            op = replace(op, batch=((0, *op.batch[0]), (0, *op.batch[1])))
        elif by_lhs:
            op = replace(op, batch_like=((0, *op.batch_like[0]), op.batch_like[1]))
        operands = [lhs, rhs]
        if bias is not None and by_rhs and not by_lhs:  # the rhs's new free dim is a bias's too
            bias = bias if bias_batched else jnp.broadcast_to(bias, (rhs.shape[0], *bias.shape))
        operands += [] if bias is None else [bias]
        if add is not None:
            size_of_new = lhs.shape[0] if by_lhs else rhs.shape[0]
            whole = add if batched[-1] else jnp.broadcast_to(add, (size_of_new, *add.shape))
            operands.append(jnp.moveaxis(whole, 0, new))
        axes = array_type.explicit_spec(lhs if by_lhs else rhs)
        asked = tuple(
            None if w is None else (*w[:new], axes[0] if axes else (), *w[new:]) for w in wanted
        )
        return tuple(jnp.moveaxis(r, new, 0) for r in run(op, operands, asked))

    def _batch_apart(
        self,
        batched: Sequence[bool],
        arrays: Arrays,
        wanted: Wanted,
        run: Callable[..., tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, ...]:
        """Where bias or `add` alone bring the new dim: the product apart, the rest on top of it."""
        bare = self.bare
        operands = arrays[:2]
        if any(batched[:2]):
            (out,) = bare.vmapped(0, batched[:2], operands, wanted, run)
        else:
            out = run(bare, operands, wanted)[0][None]
        bias, add = self._optional(arrays)
        if bias is not None:
            stretch = out.ndim - bias.ndim + (0 if batched[2] else -1)
            lead = bias.shape[:1] if batched[2] else (1,)
            bias = bias.reshape(*lead, *(1,) * stretch, *bias.shape[int(batched[2]) :])
        if add is not None and not batched[-1]:
            add = add[None]
        return self._finish(out, *(array_type.beside(out, term) for term in (bias, add)))

    def _optional(self, arrays: Arrays) -> tuple[jax.Array | None, jax.Array | None]:
        rest = iter(arrays[2:])
        return (next(rest) if self.bias else None), (next(rest) if self.add else None)

    def _finish(
        self, z: jax.Array, bias: jax.Array | None, add: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """What comes after the sum, in float32."""
        z = z.astype(jnp.float32)
        if add is not None:
            z = z + add.astype(jnp.float32)
        if bias is not None:
            z = z + bias.astype(jnp.float32)
        return self._activate(z)

    def _activate(self, z: jax.Array) -> tuple[jax.Array, ...]:
        out = ACTIVATIONS[self.activation](z.astype(jnp.float32)) if self.activation else z
        results = (out, z) if self.save else (out,)
        return tuple(r.astype(self.out_dtype) for r in results)

    def on_device(
        self, local: Callable[..., tuple[jax.Array, ...]], arrays: Arrays, **also: Any
    ) -> tuple[jax.Array, ...]:
        """The results by a local primitive."""
        epilogue = "bias" if self.bias else "none"
        fused = self.activation in ("gelu", "relu")
        if fused:
            epilogue = "gelu_aux" if self.save else self.activation
        results = local(
            *arrays,
            contracting=self.contracting,
            batch=self.batch,
            bias=self.bias,
            add=self.add,
            epilogue=epilogue,
            out_dtype=self.out_dtype,
            precision=self.precision,
            kernel=self.kernel,
            **also,
        )
        return results if fused else self._activate(results[0])


def _shift_pair(pair: DimPair, by_lhs: bool, by_rhs: bool) -> DimPair:
    return tuple(d + by_lhs for d in pair[0]), tuple(d + by_rhs for d in pair[1])
