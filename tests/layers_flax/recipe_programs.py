"""What layers move under each recipe, and keep between the passes: programs lowered for shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardops import hlo
from shardops.hlo import Collective
from shardops.layers import nnx as layers
from shardops.layers import presets
from tests import meshes
from tests.layers.eight_bits import RECIPES

# Shards of the sequence are whole blocks of 128. Heads are wider together than the stream: where
# tokens are as many as features, what is least is then to scatter sums, and to gather kernels that
# are cut for storage. Elsewhere plans move fewer bytes in other ways (docs/presets.md).
S, D, HEADS, HEAD, F = 512, 1024, 8, 256, 4096

PRESETS = {  # rules, mesh, sequences
    "tp": (presets.tensor_parallel("tp"), {"tp": 4}, 1),
    "tp+sp": (presets.tensor_sequence_parallel("tp"), {"tp": 4}, 1),
    "fsdp": (presets.fsdp("fsdp"), {"fsdp": 4}, 64),
    "dp x tp+sp": (presets.tensor_sequence_parallel("tp", data="dp"), {"dp": 2, "tp": 4}, 2),
    "fsdp x tp": (presets.fsdp_tensor_parallel("fsdp", "tp"), {"fsdp": 2, "tp": 2}, 4),
}
BLOCKS = {"block": 128, "mxfp8": 32}

LAYERS = {
    "Dense": lambda **options: layers.Dense(
        D, F, kernel_axes=("embed", "mlp"), out_axes=("batch", None, "mlp"), **options
    ),
    "LayerNormDense": lambda **options: layers.LayerNormDense(
        D, F, kernel_axes=("embed", "mlp"), out_axes=("batch", None, "mlp"), **options
    ),
    "LayerNormMLP": lambda **options: layers.LayerNormMLP(D, F, norm="rms_norm", **options),
    "TransformerLayer": lambda **options: layers.TransformerLayer(
        D, HEADS, F, head_dim=HEAD, norm="rms_norm", **options
    ),
}


# The CPU compiler moves 8-bit floats as 16-bit ones, and bfloat16 as float32.
ITEMSIZES = {"f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1, "f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Pass:
    """The collectives of one pass, by what they move."""

    data: list[Collective]  # of 8 bits
    scales: list[Collective]
    wide: list[Collective]  # bfloat16 that is gathered, and sums
    little: list[Collective]  # maxima, and the gradients of norms' parameters

    @classmethod
    def of(cls, compiled: Any, recipe: str | None) -> "Pass":
        found = hlo.collectives(compiled)
        little = [c for c in found if c.kind == "all-reduce" and c.bytes <= 2 * 4 * D + 64]
        data = [c for c in found if c.dtype in ("f16", "f8e4m3fn", "f8e5m2")]
        wide = [c for c in found if c not in little + data]
        sums = [c for c in wide if c.kind in ("all-reduce", "reduce-scatter")]
        scales = [] if recipe is None else [c for c in wide if c not in sums]
        return cls(data, scales, [c for c in wide if c not in scales], little)


def elements(c: Collective) -> int:
    """Of the result on one device."""
    return c.bytes // ITEMSIZES[c.dtype]


@dataclass(frozen=True)
class Passes:
    """Both passes of a layer, each compiled by itself."""

    forward: Pass
    backward: Pass
    kept: int  # bytes of a device between them, some of it the arguments


@dataclass(frozen=True)
class Abstract:
    """A layer of bfloat16 parameters that are shapes, and its input."""

    apply: Callable[[Any, Any], jax.Array]
    state: Any
    x: jax.ShapeDtypeStruct

    @classmethod
    def of(
        cls, layer: str, preset: str, recipe: str | None, kind: str, **options: Any
    ) -> "Abstract":
        """On the mesh of its preset, which is to be entered."""
        rules, sizes, batch = PRESETS[preset]
        mesh = meshes.make(kind, sizes)

        def shaped(of: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=NamedSharding(mesh, spec))

        def parameter(variable: nnx.Variable) -> nnx.Variable:
            names = variable.get_metadata("out_sharding", None)
            spec = P() if names is None else presets.spec(rules, *names)
            return variable.replace(jax.tree.map(lambda a: shaped(a, spec), variable.get_value()))

        made = nnx.eval_shape(
            lambda: LAYERS[layer](
                use_bias=False,
                param_dtype=jnp.bfloat16,
                rules=rules,
                recipe=None if recipe is None else RECIPES[recipe],
                rngs=nnx.Rngs(0),
                **options,
            )
        )
        graph, state = nnx.split(made)

        def apply(state: Any, x: jax.Array) -> jax.Array:
            model = nnx.merge(graph, state)
            return (layers.watch(model) if recipe == "delayed" else model)(x)

        stream = jax.ShapeDtypeStruct((batch, S, D), jnp.bfloat16)
        state = jax.tree.map(parameter, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        return cls(apply, state, shaped(stream, presets.layout(rules).stream))


def passes(layer: str, preset: str, kind: str, recipe: str | None, **options: Any) -> Passes:
    """Of a layer on four devices."""
    rules, sizes, _ = PRESETS[preset]
    of = Abstract.of(layer, preset, recipe, kind, **options)
    with meshes.entered(kind, sizes) as mesh:
        auto, lies = kind == "auto", presets.layout(rules)
        ends = lies.hidden if "Dense" in layer else lies.stream
        given = {"out_shardings": (NamedSharding(mesh, ends), None)} if auto else {}
        forward = jax.jit(partial(jax.vjp, of.apply), **given).lower(of.state, of.x)
        first = forward.compile()
        y, pull = jax.tree.map(
            lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at),
            forward.out_info,
            first.output_shardings,
        )
        ends = (jax.tree.map(lambda a: a.sharding, of.state), of.x.sharding)
        given = {"out_shardings": ends} if auto else {}
        second = jax.jit(lambda pull, dy: pull(dy), **given).lower(pull, y).compile()
    kept = sum(
        prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(pull)
    )
    return Passes(Pass.of(first, recipe), Pass.of(second, recipe), kept)


def inside_shard_map(recipe: str | None) -> Pass:
    """Both passes of a transformer layer in one program, in a region that is manual over dp."""
    of = Abstract.of("TransformerLayer", "dp x tp+sp", recipe, "auto")
    with meshes.entered("auto", PRESETS["dp x tp+sp"][1]):

        def step(state: Any, x: jax.Array, dy: jax.Array) -> Any:
            y, pull = jax.vjp(of.apply, state, x)
            return y, pull(dy)

        mapped = jax.shard_map(
            step,
            in_specs=(P(), P("dp"), P("dp")),
            out_specs=(P("dp"), (P(), P("dp"))),
            axis_names={"dp"},
        )
        ends = jax.tree.map(lambda a: a.sharding, (of.x, (of.state, of.x)))
        lowered = jax.jit(mapped, out_shardings=ends).lower(of.state, of.x, of.x)
        return Pass.of(lowered.compile(), recipe)
