"""Trains for fifty steps with kernels that nobody has compiled or loaded before.

`python -m tests.gpu.fifty_steps`, run by test_cases_gpu.py. Prints as JSON, of each step, what was
compiled, loaded and launched, and how far the trained parameters are from float64's.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

import shardops as so
from shardops.kernels import compile, library

STEPS, AGAIN = 50, 10
BATCH, QUERIES, WIDTH, HIDDEN = 4, 60, 312, 640  # lengths of no other test
RATE = 0.05


def model(p, x, mask, ops):
    norm, h = ops.rms_norm(x, p["gamma"])
    hidden = ops.gemm(norm, p["up"])
    z = ops.layer_norm(ops.gemm(hidden * jax.nn.sigmoid(hidden), p["down"]) + h, p["beta"])
    return ops.softmax(z, mask)


class Kernels:
    @staticmethod
    def rms_norm(x, gamma):
        return so.rms_norm(x, gamma, return_input=True)

    @staticmethod
    def layer_norm(x, beta):
        return so.layer_norm(x, jnp.ones_like(beta), beta)

    @staticmethod
    def gemm(lhs, rhs):
        return so.gemm(lhs, rhs)

    @staticmethod
    def softmax(z, mask):
        return so.softmax(z, scale=0.5, mask=mask, causal="bottom_right")


class Float64:
    @staticmethod
    def rms_norm(x, gamma):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma, x

    @staticmethod
    def layer_norm(x, beta):
        d = x - x.mean(-1, keepdims=True)
        return d / jnp.sqrt((d**2).mean(-1, keepdims=True) + 1e-6) + beta

    @staticmethod
    def gemm(lhs, rhs):
        return lhs @ rhs

    @staticmethod
    def softmax(z, mask):
        queries, keys = z.shape[-2:]
        later = jnp.arange(keys) > jnp.arange(queries)[:, None] + keys - queries
        return jax.nn.softmax(0.5 * z, where=~(mask | later))


def step(p, x, mask, target, ops):
    def loss(p):
        return jnp.sum((model(p, x, mask, ops) - target) ** 2)

    return jax.tree.map(lambda a, g: a - RATE * g, p, jax.grad(loss)(p))


def operands():
    rng = np.random.default_rng(0)

    def draw(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    p = {
        "gamma": 1 + draw(WIDTH, scale=0.1),
        "beta": draw(WIDTH, scale=0.1),
        "up": draw(WIDTH, HIDDEN, scale=WIDTH**-0.5),
        "down": draw(HIDDEN, WIDTH, scale=HIDDEN**-0.5),
    }
    mask = rng.random((BATCH, 1, WIDTH)) < 0.2
    mask[..., 0] = False  # each row sees something
    return p, draw(BATCH, QUERIES, WIDTH), mask, draw(BATCH, QUERIES, WIDTH)


def counted():
    found = library.core().counters()
    launched = found["kernels_launched"] + found["gemms_launched"]
    return {"compiled": compile.counts.compiled, "loaded": found["cubins_loaded"]}, launched


def main() -> None:
    p, *rest = operands()
    on_device = jax.device_put((p, *rest), jax.devices("cuda")[0])
    jitted = jax.jit(lambda p, *rest: step(p, *rest, Kernels))
    trained, *arrays = on_device
    seen = []
    for n in range(STEPS + AGAIN):
        _, before = counted()
        result = jax.block_until_ready(jitted(trained, *arrays))
        trained = result if n < STEPS else trained  # then the same step over and over
        code, launched = counted()
        seen.append({**code, "launched": launched - before})

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), p)
        x, mask, target = rest
        exact = jax.jit(lambda p, x, target: step(p, x, mask, target, Float64))
        for _ in range(STEPS):
            wide = exact(wide, x.astype(np.float64), target.astype(np.float64))
        errors = {
            name: float(np.abs(np.asarray(trained[name]) - a).max() / np.abs(a).max())
            for name, a in wide.items()
        }
        moved = {name: float(np.abs(p[name] - a).max()) for name, a in wide.items()}
    print(json.dumps({"steps": seen, "errors": errors, "moved": moved}))


if __name__ == "__main__":
    main()
