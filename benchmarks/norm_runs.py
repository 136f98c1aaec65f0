"""One norm on this GPU, launched without XLA: its arrays, and its launches for a launch shape."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raw_launch import Call, Device
from shardops.kernels.launch import Launch
from shardops.kernels.norm_plan import Geometry, backward_plan, forward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_staged import Staged
from shardops.kernels.target import Target

Plans = tuple[Launch, ...]
MAX_PARTIALS = 16  # rows of partials a multiprocessor


def plans_of(
    problem: NormProblem, backward: bool, geometry: Geometry | Staged | None, target: Target
) -> Plans:
    """The launches, in order; None is the plan's own choice of a shape."""
    if not backward:
        return (forward_plan(problem, target, geometry),)
    plan = backward_plan(problem, target, geometry)
    return plan.main, plan.finish


class NormRun:
    """Arrays of a problem, larger than the caches together, and calls that use them."""

    def __init__(self, problem: NormProblem, backward: bool, target: Target):
        self.problem, self.backward = problem, backward
        shape, row, dtype = (problem.rows, problem.cols), (problem.cols,), jnp.dtype(problem.x)
        layer, add = problem.kind == "layer", problem.add

        def draw(seed: int, of: tuple[int, ...]) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), of, dtype)

        gamma, x = draw(0, row), draw(1, shape)
        mean, rstd = (jnp.full(shape[0], v, jnp.float32) for v in (0.01, 1.0))
        beta = draw(2, row) if layer else None
        residual = draw(3, shape) if add else None
        out = jnp.zeros(shape, dtype)
        if backward:
            partials = jnp.zeros(
                problem.sums * target.sm_count * MAX_PARTIALS * problem.cols, jnp.float32
            )
            sums = [jnp.zeros(row, jnp.float32) for _ in range(problem.sums)]
            means = mean if layer else None
            first = [draw(4, shape), x, gamma, means, rstd, residual, out, partials]
            self.operands = [first, [partials, *sums]]
            self.results = [out, *sums]
        else:
            statistics = [mean, rstd] if layer else [rstd]
            outs = [out, jnp.zeros(shape, dtype)] if add else [out]
            self.operands = [[x, gamma, beta, residual, *outs, *statistics]]
            self.results = [*outs, *statistics]
        jax.block_until_ready(self.operands)

    @property
    def bytes(self) -> int:
        """What must move: rows once in, once out."""
        problem = self.problem
        arrays = (3 + problem.add) if self.backward else (2 + 2 * problem.add)
        return arrays * problem.rows * problem.cols * jnp.dtype(problem.x).itemsize

    def calls(self, device: Device, plans: Plans, cubins: tuple[bytes, ...]) -> list[Call]:
        scalars: list[list[Any]] = [[np.int64(self.problem.rows)]]
        if self.backward:
            scalars.append([np.int32(plans[0].grid[0] // plans[0].cluster[0])])
        else:
            scalars[0].append(np.float32(1e-6))
        return [
            Call(device, launch, cubin, [a for a in arrays if a is not None], values)
            for launch, cubin, arrays, values in zip(
                plans, cubins, self.operands, scalars, strict=True
            )
        ]

    def values(self) -> list[np.ndarray]:
        """The first rows of the results, and the rest's: to compare candidates by."""
        copies = [jnp.array(result) for result in self.results]
        return [np.asarray(c[:64] if c.ndim == 2 else c).astype(np.float32) for c in copies]


def launched(calls: list[Call]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def relative_error(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Of the worst result, to the largest number in it."""
    pairs = zip(got, want, strict=True)
    return max(float(np.abs(g - w).max() / max(np.abs(w).max(), 1e-9)) for g, w in pairs)
