"""A decoder-only language model of the library's Flax modules, and where its parameters lie.

Tensor, sequence and data parallel, said by the rules of a preset alone: between products the stream
is sharded over batch (dp) and sequence (tp); the products into a block are split by columns (heads,
hidden features), those out of it by rows, whose partial sums are scattered over the sequence.

Parameters and the state of delayed scaling are plain dicts of arrays outside of the modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardops as so
from shardops.layers import nnx as layers
from shardops.layers import presets
from shardops.layers.axes import Rules
from shardops.quantizer import DenseQuantizers

from .plain import cross_entropy

RECIPES = {
    "none": None,
    "delayed": so.recipes.DelayedScaling(amax_history_len=16),
    "current": so.recipes.CurrentScaling(),
    "block128": so.recipes.Block128Scaling(),
    "mxfp8": so.recipes.MXFP8Scaling(),
}
TENSOR_SEQUENCE_PARALLEL = presets.tensor_sequence_parallel("tp", data="dp")


@dataclass(frozen=True)
class Sizes:
    dim: int
    layers: int
    heads: int
    seq: int
    vocabulary: int


class Model(nnx.Module):
    """Token and position embeddings, pre-norm layers, a norm, and a head.

    recipe: of the products of the layers; embeddings and head stay as they are.
    """

    def __init__(
        self, sizes: Sizes, *, rules: Rules, recipe: Any, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def table(rows: int, rows_axis: str | None) -> nnx.Param:
            init = nnx.with_partitioning(
                nnx.initializers.normal(), (rows_axis, None), eager_sharding=False
            )
            return nnx.Param(init(rngs.params(), (rows, sizes.dim), jnp.float32))

        self.dtype, self.stream = dtype, presets.layout(rules).stream if rules else None
        self.embedding = table(sizes.vocabulary, None)
        self.position = table(sizes.seq, "sequence")
        common: dict[str, Any] = {"dtype": dtype, "rules": rules, "rngs": rngs}
        self.layers = nnx.List(
            layers.TransformerLayer(
                sizes.dim, sizes.heads, 4 * sizes.dim, use_bias=True, recipe=recipe, **common
            )
            for _ in range(sizes.layers)
        )
        self.norm = layers.RMSNorm(sizes.dim, **common)
        self.head = layers.Dense(
            sizes.dim, sizes.vocabulary, use_bias=False, kernel_axes=("embed", None), **common
        )

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, seq, vocabulary] of characters [batch, seq]; they lie as the stream."""
        x = self.embedding[...].at[inputs].get(out_sharding=self.stream) + self.position[...]
        x = x.astype(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def functional(sizes: Sizes, *, rules: Rules = (), recipe: str, dtype: str) -> "Functional":
    """The functions of a `Model`; recipe: its name in RECIPES."""
    options: dict[str, Any] = {"rules": rules, "recipe": RECIPES[recipe]}
    return Functional(
        lambda: Model(sizes, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), **options), **options
    )


class Functional:
    """A model as functions of its parameters and of the state of its recipe.

    make: gives the model; called for its structure alone.
    """

    def __init__(
        self, make: Callable[[], nnx.Module], *, rules: Rules = (), recipe: Any = None
    ) -> None:
        self._graph, self._params, self._quantizers = nnx.split(
            nnx.eval_shape(make), nnx.Param, layers.QuantizerState
        )
        self._rules, self._recipe = rules, recipe
        self.shapes = nnx.to_pure_dict(self._params)

    def loss(self, params: Any, quantizers: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        """Mean cross-entropy in nats a character."""
        model: Any = nnx.merge(
            self._graph, _filled(self._params, params), _filled(self._quantizers, quantizers)
        )
        return cross_entropy(model(inputs), targets)

    def fresh_quantizers(self) -> Any:
        """The state of delayed scaling before the first step; empty for other recipes."""
        return jax.tree.map(
            lambda _: self._recipe.dense_quantizers(),
            nnx.to_pure_dict(self._quantizers),
            is_leaf=lambda value: isinstance(value, DenseQuantizers),
        )

    def specs(self) -> Any:
        """The sharding of every parameter: that of its logical axes by the rules."""
        specs = jax.tree.map(
            lambda variable: presets.spec(self._rules, *variable.get_metadata("out_sharding")),
            self._params,
            is_leaf=lambda value: isinstance(value, nnx.Variable),
        )
        return nnx.to_pure_dict(specs)


def _filled(state: Any, values: Any) -> Any:
    filled = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(filled, values)
    return filled
