"""Transformer layers of both frameworks as functions of one tree of parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardops.layers import linen, presets
from shardops.layers import nnx as of_nnx
from tests.layers_flax.plain import Model

# Tokens of a group of tensor-parallel devices are as many as features: fewer bytes than any weight.
B, S, D, HEADS, KV, F = 4, 64, 128, 8, 4, 512

FRAMEWORKS = ("nnx", "linen")

PRESETS = {
    "dp": lambda: presets.data_parallel("dp"),
    "fsdp": lambda: presets.fsdp("fsdp"),
    "tp": lambda: presets.tensor_parallel("tp", data="dp"),
    "tp+sp": lambda: presets.tensor_sequence_parallel("tp", data="dp"),
    "fsdp x tp": lambda: presets.fsdp_tensor_parallel("fsdp", "tp"),
}
MESHES = {
    "dp": {"dp": 8},
    "fsdp": {"fsdp": 8},
    "tp": {"dp": 2, "tp": 4},
    "tp+sp": {"dp": 2, "tp": 4},
    "fsdp x tp": {"fsdp": 2, "tp": 4},
}


@dataclass(frozen=True)
class Layer:
    """A layer: its parameters' shapes and logical axes, and what it computes of them."""

    shapes: Any
    names: Any
    apply: Callable[..., jax.Array]


def layer(framework: str, model: Model, **options: Any) -> Layer:
    """A TransformerLayer of D features."""
    kv = options.pop("num_kv_heads", KV)
    heads = options.pop("num_heads", HEADS)
    options = {
        "num_kv_heads": kv,
        "norm": model.norm,
        "activation": model.activation,
        "kind": "decoder" if model.causal else "encoder",
        "rope_theta": model.rope_theta,
        **options,
    }
    if framework == "linen":
        return _of_linen(linen.TransformerLayer(heads, F, **options))
    return _of_nnx(of_nnx.TransformerLayer(D, heads, F, rngs=nnx.Rngs(0), **options))


def _of_linen(module: nn.Module) -> Layer:
    x = jax.ShapeDtypeStruct((1, 8, D) if module.batch_first else (8, 1, D), jnp.float32)
    given = {"lengths": jax.ShapeDtypeStruct((1,), jnp.int32)} if module.padded else {}
    boxed = jax.eval_shape(module.init, jax.random.key(0), x, **given)["params"]
    names = jax.tree.map(
        lambda box: box.names, boxed, is_leaf=lambda box: isinstance(box, nn.LogicallyPartitioned)
    )
    return Layer(
        nn.unbox(boxed),
        names,
        lambda params, x, **more: module.apply({"params": params}, x, **more),
    )


def _of_nnx(module: nnx.Module) -> Layer:
    graph, state = nnx.split(module)

    def apply(params: Any, x: jax.Array, **more: Any) -> jax.Array:
        held = jax.tree.map(lambda a: a, state)
        nnx.replace_by_pure_dict(held, params)
        return nnx.merge(graph, held)(x, **more)

    names = jax.tree.map(
        lambda v: v.get_metadata("out_sharding"),
        state,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )
    return Layer(nnx.to_pure_dict(state), nnx.to_pure_dict(names), apply)


def drawn(rng: np.random.Generator, shapes: Any, dtype: str = "float32") -> Any:
    """Parameters of about the size that initializers give."""

    def of(path: Any, leaf: Any) -> np.ndarray:
        value = rng.standard_normal(leaf.shape)
        name = path[-1].key
        if name == "scale":
            value = 1 + 0.1 * value
        elif name == "kernel":
            value = value / np.sqrt(D if path[-2].key not in ("out", "down") else leaf.size / D)
        return value.astype(jnp.dtype(dtype))

    return jax.tree.map_with_path(of, shapes)


def placed(mesh: Any, rules: Any, names: Any, params: Any) -> Any:
    """Parameters where rules put them."""
    return jax.tree.map(
        lambda a, axes: jax.device_put(a, NamedSharding(mesh, presets.spec(rules, *axes))),
        params,
        names,
    )


def stream(mesh: Any, rules: Any, batch_first: bool = True) -> NamedSharding:
    """Where the residual stream lies."""
    return NamedSharding(mesh, P(*presets.layout(rules, batch_first=batch_first).stream))
