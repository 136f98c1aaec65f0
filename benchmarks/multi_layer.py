"""A transformer layer over several devices for `multi.py`, and the same in plain jnp."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

import shardops as so
from multi_products import RECIPES
from multi_timing import Program, alone, by_xla, drawn, mesh_of
from shardops.layers import nnx as layers
from shardops.layers import presets

PRESETS = {
    "tp+sp": lambda: presets.tensor_sequence_parallel("tp"),
    "fsdp": lambda: presets.fsdp("tp"),
}
THETA = 5e5


@dataclass(frozen=True)
class Sizes:
    """By default those of Llama 3 8B."""

    batch: int = 2
    sequence: int = 4096
    features: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336


@dataclass(frozen=True)
class Layer:
    """A layer, forward and backward. Weak scaling has the batch grow with the devices."""

    preset: str
    operands: str  # of RECIPES
    devices: int
    sizes: Sizes
    scaling: str = "strong"

    backward = True

    @property
    def name(self) -> str:
        return f"layer, {self.preset}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, features, hidden features."""
        return self.batch * self.sizes.sequence, self.sizes.features, self.sizes.hidden

    @property
    def batch(self) -> int:
        return self.sizes.batch * (self.devices if self.scaling == "weak" else 1)

    @property
    def flops(self) -> float:
        """Of the products and of causal attention, of all devices."""
        of, tokens = self.sizes, self.shape[0]
        attention = of.features * of.features * (2 + 2 * of.kv_heads / of.heads)
        products = 6.0 * tokens * (attention + 3 * of.features * of.hidden)
        # Two products forward and four backward, and the scores once more; half of them is hidden.
        return products + 7.0 * tokens * of.sequence * of.features

    def programs(self) -> tuple[dict[str, Program], Any]:
        """What to time by name, and the report of `explain`."""
        mesh, rules = mesh_of(self.devices), PRESETS[self.preset]()
        of = self.sizes
        module = nnx.eval_shape(lambda: self._module(rules))
        graph, abstract, state = nnx.split(module, nnx.Param, layers.QuantizerState)
        with jax.set_mesh(mesh):
            quantizers = jax.tree.map(jnp.zeros_like, state)
            if self.operands == "delayed":  # as after a step
                quantizers = jax.tree.map(jnp.ones_like, state)
            params = jax.tree.map(
                lambda v: v.replace(
                    drawn(mesh, v.shape, presets.spec(rules, *v.get_metadata("out_sharding")), 0.02)
                ),
                abstract,
                is_leaf=lambda v: isinstance(v, nnx.Variable),
            )
            stream = P(*presets.layout(rules).stream)
            shape = (self.batch, of.sequence, of.features)
            x, dy = (drawn(mesh, shape, stream, scale) for scale in (1.0, 1e-3))

            def step(params: Any, quantizers: Any, x: jax.Array, dy: jax.Array) -> Any:
                def f(params: Any, quantizers: Any, x: jax.Array) -> jax.Array:
                    return layers.watch(nnx.merge(graph, params, quantizers))(x)

                y, pull = jax.vjp(f, params, quantizers, x)
                return y, pull(dy)

            operands = (params, quantizers, x, dy)
            report = so.explain(step, compare=False)(*operands)
            found = {"shardops": Program.of(step, *operands)}
        moved = alone([c for c in report.collectives or () if c.bytes > 4096], mesh)
        if moved is not None:
            found["collectives alone"] = moved
        if self.operands == "bfloat16":
            found |= self._xla(mesh, nnx.to_pure_dict(params), x, dy)
        return found, report

    def _module(self, rules: Any) -> nnx.Module:
        of = self.sizes
        return layers.TransformerLayer(
            of.features,
            of.heads,
            of.hidden,
            num_kv_heads=of.kv_heads,
            activation=("silu", "linear"),
            rope_theta=THETA,
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
            recipe=RECIPES[self.operands],
            rules=rules,
            rngs=nnx.Rngs(0),
        )

    def _xla(self, mesh: Mesh, params: Any, x: jax.Array, dy: jax.Array) -> dict[str, Program]:
        """Plain jnp on Auto axes, with the same attention by cuDNN and the same layouts."""
        auto = mesh_of(mesh.size, AxisType.Auto)
        moved = lambda a: jax.device_put(a, NamedSharding(auto, a.sharding.spec))  # noqa: E731
        params, x, dy = jax.tree.map(moved, (params, x, dy))
        lie = presets.layout(PRESETS[self.preset]())
        stream, heads = (NamedSharding(auto, P(*spec)) for spec in (lie.stream, lie.heads))

        def step(params: Any, x: jax.Array, dy: jax.Array) -> Any:
            y, pull = jax.vjp(lambda p, x: plain_layer(p, x, stream, heads), params, x)
            return y, pull(dy)

        out = jax.tree.map(lambda a: a.sharding, (x, (params, x)))
        # XLA of JAX 0.11.2 ends the process over TP+SP with these options: its rewrite of gathers
        # leaves a cycle among dynamic-update-slices.
        overlapping = self.preset == "fsdp"
        with jax.set_mesh(auto):
            return by_xla(
                self.devices, step, params, x, dy, overlapping=overlapping, out_shardings=out
            )


def plain_layer(
    params: Any, x: jax.Array, stream: NamedSharding, heads: NamedSharding
) -> jax.Array:
    """The layer as one writes it in jnp; the partitioner is told where stream and heads lie."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        return (y * scale).astype(x.dtype)

    held = jax.lax.with_sharding_constraint
    of = params["attention"]
    y = norm(x, params["attention_norm"]["scale"])
    q, k, v = (
        held(jnp.einsum("bsd,dhf->bshf", y, of[name]["kernel"]), heads)
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(
        rotated(q),
        rotated(k),
        v,
        is_causal=True,
        implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
    )
    x = x + held(jnp.einsum("bshf,hfd->bsd", mixed, of["out"]["kernel"]), stream)
    y = norm(x, params["mlp"]["norm"]["scale"])
    up = jnp.einsum("bsd,dgf->bsgf", y, params["mlp"]["up"]["kernel"])
    hidden = jax.nn.silu(up[:, :, 0]) * up[:, :, 1]
    return x + held(jnp.einsum("bsf,fd->bsd", hidden, params["mlp"]["down"]["kernel"]), stream)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, sequence, heads, features]."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angle)[:, None], jnp.float32) for f in (np.cos, np.sin))
    one, other = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1).astype(x.dtype)


def layers_of(devices: int, sizes: Sizes) -> list[Layer]:
    """Those of one number of devices; on one, where both scalings start."""
    strong = [Layer("tp+sp", operands, devices, sizes) for operands in RECIPES]
    if devices == 1:
        return strong
    weak = [Layer("fsdp", operands, devices, sizes, "weak") for operands in ("bfloat16", "delayed")]
    return strong + weak
