"""The demo's model of Flax's own layers, for XLA alone: what `train.py` times beside shardops.

Its parameters have the same names and shapes as those of `lm.model.Model`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm.model import Sizes


class Attention(nnx.Module):
    def __init__(self, sizes: Sizes, **common: Any) -> None:
        heads = (sizes.heads, sizes.dim // sizes.heads)
        self.query = nnx.LinearGeneral(sizes.dim, heads, **common)
        self.key = nnx.LinearGeneral(sizes.dim, heads, **common)
        self.value = nnx.LinearGeneral(sizes.dim, heads, **common)
        self.out = nnx.LinearGeneral(heads, sizes.dim, axis=(-2, -1), **common)

    def __call__(self, y: jax.Array) -> jax.Array:
        fits = jax.default_backend() == "gpu" and y.dtype != jnp.float32
        mixed = jax.nn.dot_product_attention(
            self.query(y),
            self.key(y),
            self.value(y),
            is_causal=True,
            implementation="cudnn" if fits else "xla",
        )
        return self.out(mixed)


class MLP(nnx.Module):
    def __init__(self, sizes: Sizes, **common: Any) -> None:
        self.norm = nnx.RMSNorm(sizes.dim, **common)
        self.up = nnx.Linear(sizes.dim, 4 * sizes.dim, **common)
        self.down = nnx.Linear(4 * sizes.dim, sizes.dim, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(self.norm(x)), approximate=True))


class Layer(nnx.Module):
    def __init__(self, sizes: Sizes, **common: Any) -> None:
        self.attention_norm = nnx.RMSNorm(sizes.dim, **common)
        self.attention = Attention(sizes, **common)
        self.mlp = MLP(sizes, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class FlaxModel(nnx.Module):
    def __init__(self, sizes: Sizes, *, dtype: Any, rngs: nnx.Rngs) -> None:
        common: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.dtype = dtype
        self.embedding = nnx.Param(jnp.zeros((sizes.vocabulary, sizes.dim)))
        self.position = nnx.Param(jnp.zeros((sizes.seq, sizes.dim)))
        self.layers = nnx.List(Layer(sizes, **common) for _ in range(sizes.layers))
        self.norm = nnx.RMSNorm(sizes.dim, **common)
        self.head = nnx.Linear(sizes.dim, sizes.vocabulary, use_bias=False, **common)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = (self.embedding[...][inputs] + self.position[...]).astype(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
