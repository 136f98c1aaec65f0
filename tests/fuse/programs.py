"""Model code for the tests of `fuse`, what its programs hold, and how it compares with itself."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardops as so
from shardops.fusing.report import Report
from tests.closeness import assert_close

DIM, HIDDEN = 16, 32


def parameters(rng: np.random.Generator, dtype: Any = np.float32) -> dict[str, jax.Array]:
    shapes = {
        "gamma": (DIM,),
        "up": (DIM, HIDDEN),
        "up_bias": (HIDDEN,),
        "down": (HIDDEN, DIM),
    }
    return {name: draw(rng, *shape, dtype=dtype) for name, shape in shapes.items()}


def draw(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return (
        jnp.asarray(rng.standard_normal(shape), dtype) / (shape[0] if len(shape) == 2 else 1) ** 0.5
    )


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A pre-norm MLP with its residual branch, as one writes it."""
    hidden = jax.nn.gelu(so.gemm(so.rms_norm(x, p["gamma"]), p["up"]) + p["up_bias"])
    return x + so.gemm(hidden, p["down"])


def two_blocks(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return block(p, block(p, x))


# what `fuse` finds in `two_blocks`: the second norm's sum is the first block's result
TWO_BLOCKS = {"return_input": 1, "add": 1, "bias+activation": 2}


def ops_in(jaxpr: Any) -> Counter[str]:
    """The device-local ops of a traced program, with what is fused into them."""
    return Counter(_ops(getattr(jaxpr, "jaxpr", jaxpr)))


def _ops(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "shardops_norm_forward":
            yield "norm, add" if params["add"] else "norm"
        elif name == "shardops_norm_backward":
            yield "backward, residual" if params["residual"] else "backward"
        elif name == "shardops_gemm":
            yield f"gemm, {params['epilogue']}" + (" of bias" if params["bias"] else "")
        for value in params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _ops(inner)


def kinds(report: Report) -> dict[str, int]:
    return dict(Counter(f.kind for f in report.fused))


def assert_same(
    fn: Callable[..., Any],
    *args: Any,
    roundings: int = 4,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Report:
    """Values and gradients of the fused function are those of the function; what was fused.

    Both are parts of one program, which compiles faster than two; with `wrap` each is its own.
    """
    fused = so.fuse(fn)
    plain_and_fused = [values_and_gradients(f) for f in (fn, fused)]
    if wrap is None:
        want, got = jax.jit(lambda *args: [f(*args) for f in plain_and_fused])(*args)
    else:
        want, got = (wrap(f)(*args) for f in plain_and_fused)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(g) == jax.typeof(w)
        assert_close(g, np.asarray(w, np.float64), reduced=64, roundings=roundings)
    return fused.report


def values_and_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        """The cotangent of each result is a number of its own for each element."""

        def loss(*args: Any) -> Any:
            results = fn(*args)
            return _weighed(results), results

        numbers = tuple(range(len(args)))
        (_, results), gradients = jax.value_and_grad(loss, numbers, has_aux=True)(*args)
        return results, gradients

    return both


def loss_of(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda *args: _weighed(fn(*args))


def _weighed(results: Any) -> Any:
    leaves = [r.astype(jnp.float32) for r in jax.tree.leaves(results)]
    return sum(jnp.sum(r * jnp.cos(jnp.arange(r.size)).reshape(r.shape)) for r in leaves)
