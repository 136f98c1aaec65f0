"""The everyday layouts as compiled programs: by shardops on two routes, and by XLA alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import shardops as so
from shardops import hlo
from shardops.recording import recording
from shardops.rules.spec import Spec, to_partition_spec, to_spec
from tests import meshes, received
from tests.layouts import Layout
from tests.rules import brute_force

WITHIN = 1.1  # of the bound counts as met: a plan of fewer steps may win on latency


@dataclass(frozen=True)
class Program:
    """What one device receives and computes in a compiled product, and where the result lies."""

    collectives: tuple[hlo.Collective, ...]
    received: float
    flops: float
    out: Spec
    planned: float | None = None  # bytes by shardops' plan

    def meets(self, least: float) -> bool:
        return self.received <= WITHIN * least


@cache
def explicit(layout: Layout, out_sharding: str | None = None) -> Program:
    """By shardops, on Explicit axes."""
    wanted = out_sharding if layout.wanted is None else to_partition_spec(layout.wanted)

    def f(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return product(layout, lhs, rhs, wanted)

    with meshes.entered("explicit", layout.sizes) as mesh:
        operands = operands_of(layout, mesh)
        with recording() as records:
            compiled = jax.jit(f).lower(*operands).compile()
            typed = jax.eval_shape(f, *operands).sharding.spec
    return _program(compiled, to_spec(typed, len(layout.shapes[2])), records)


@cache
def auto(layout: Layout) -> Program:
    """By shardops, on Auto axes."""

    def f(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return product(layout, lhs, rhs, None)

    with recording() as records:
        compiled = _compiled_auto(f, layout, layout.wanted)
    return _program(compiled, _propagated(compiled, layout), records)


@cache
def xla(layout: Layout, out: Spec | None) -> Program:
    """By XLA's partitioner, the result in `out`; None: where the partitioner puts it.

    All-reduces that are sliced afterwards count as reduce-scatters.
    """

    def f(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(lhs, rhs, layout.dimension_numbers)

    compiled = _compiled_auto(f, layout, out)
    return Program(
        collectives=hlo.collectives(compiled),
        received=received.received_at_best(compiled),
        flops=received.flops(compiled),
        out=_propagated(compiled, layout),
    )


def bound(layout: Layout, out: Spec | None, at_flops: float) -> float:
    """The fewest bytes that a device has to receive, by trying everything; `out` None: any."""
    lhs, rhs, _ = (brute_force.Array(shape) for shape in layout.shapes)
    contracting, batch = layout.dimension_numbers
    mesh = tuple(layout.sizes.items())
    product = brute_force.Product(lhs, rhs, contracting, mesh, batch)
    return brute_force.bound(product, *layout.specs, out, at_flops)


def product(layout: Layout, lhs: jax.Array, rhs: jax.Array, out_sharding) -> jax.Array:
    """The product by shardops: `gemm` where it has no batch dims."""
    contracting, batch = layout.dimension_numbers
    if batch[0]:
        return so.dot_general(lhs, rhs, (contracting, batch), out_sharding=out_sharding)
    return so.gemm(
        lhs,
        rhs,
        contracting_dims=contracting,
        batch_dims=layout.batch_like_dims,
        out_sharding=out_sharding,
    )


def operands_of(layout: Layout, mesh: jax.sharding.Mesh) -> list[jax.ShapeDtypeStruct]:
    """The operands' types, float32."""
    return [
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, to_partition_spec(spec))
        )
        for shape, spec in zip(layout.shapes[:2], layout.specs, strict=True)
    ]


def _compiled_auto(f: Callable, layout: Layout, out: Spec | None) -> jax.stages.Compiled:
    mesh = meshes.make("auto", layout.sizes)
    options = {}
    if out is not None:
        options["out_shardings"] = NamedSharding(mesh, to_partition_spec(out))
    return jax.jit(f, **options).lower(*operands_of(layout, mesh)).compile()


def _propagated(compiled: jax.stages.Compiled, layout: Layout) -> Spec:
    return to_spec(compiled.output_shardings.spec, len(layout.shapes[2]))


def _program(compiled: jax.stages.Compiled, out: Spec, records: list) -> Program:
    return Program(
        collectives=hlo.collectives(compiled),
        received=received.received(compiled),
        flops=received.flops(compiled),
        out=out,
        planned=_planned(records),
    )


def _planned(records: list) -> float | None:
    """Bytes of the plan that was recorded last: Auto axes are offered layouts more than once."""
    if not records:
        return None
    placement = records[-1].placement
    return sum(step.bytes for step in (*placement.moves, *placement.steps))
