"""Memory that a layer keeps between the passes, under each checkpoint policy, by the compiler.

    python benchmarks/policies.py [--dim 1024] [--heads 16] [--seq 1024] [--batch 16]

A pre-norm decoder layer in a `lax.scan` over layers, forward and backward, in bfloat16: what the
compiled program's temporaries grow by from one layer to the next (`memory_analysis()`), which is
what that layer keeps. Nothing runs; needs a GPU, as another backend keeps other things.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardops as so
from shardops.layers import nnx as layers

RECIPES: dict[str, Any] = {
    "bfloat16": None,
    "current": so.recipes.CurrentScaling(),
    "block128": so.recipes.Block128Scaling(),
}
POLICIES: dict[str, Any] = {
    "no checkpoint": None,
    "`save_gemms`": so.checkpoint_policies.save_gemms,
    "`save_gemms_without_batch_dims`": so.checkpoint_policies.save_gemms_without_batch_dims,
    "`save_norms`": so.checkpoint_policies.save_norms,
    "`save_quantized`": so.checkpoint_policies.save_quantized,
    "nothing but the input": jax.checkpoint_policies.nothing_saveable,
}
FEW, MANY = 4, 12


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("dim", 1024), ("heads", 16), ("seq", 1024), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    asked = [(recipe, policy) for recipe in RECIPES for policy in POLICIES]
    with ThreadPoolExecutor(options.threads) as pool:
        jobs = {
            each: [pool.submit(temporaries, options, *each, n) for n in (FEW, MANY)]
            for each in asked
        }
        of_a_layer = {
            each: (many.result() - few.result()) / (MANY - FEW)
            for each, (few, many) in jobs.items()
        }
    print(f"| MB a layer | {' | '.join(RECIPES)} |")
    print(f"|---|{'---|' * len(RECIPES)}")
    for policy in POLICIES:
        row = [f"{of_a_layer[recipe, policy] / 1e6:.1f}" for recipe in RECIPES]
        print(f"| {policy} | {' | '.join(row)} |")
    if options.json:
        facts = {f"{recipe}, {policy}": value for (recipe, policy), value in of_a_layer.items()}
        options.json.write_text(json.dumps(facts))


def temporaries(options: argparse.Namespace, recipe: str, policy: str, count: int) -> int:
    """Bytes of temporaries of the gradients of so many layers."""
    dim, heads = options.dim, options.heads

    def make() -> Any:
        return layers.TransformerLayer(
            dim, heads, 4 * dim, dtype=jnp.bfloat16, recipe=RECIPES[recipe], rngs=nnx.Rngs(0)
        )

    graph, params = nnx.split(nnx.eval_shape(make))
    stack = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), params)
    x = jax.ShapeDtypeStruct((options.batch, options.seq, dim), jnp.bfloat16)

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        return nnx.merge(graph, params)(x), None

    body: Callable[..., Any] = layer
    if policy != "no checkpoint":
        body = jax.checkpoint(layer, policy=POLICIES[policy])

    def loss(stack: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, stack)[0].astype(jnp.float32)))

    compiled = jax.jit(jax.grad(loss)).lower(stack, x).compile()
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


if __name__ == "__main__":
    main(sys.argv[1:])
