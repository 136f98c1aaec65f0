"""One norm on this GPU, launched without XLA: its arrays, and its launches for a launch shape."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raw_launch import Call, Device, numbers
from shardops.kernels.launch import Launch
from shardops.kernels.norm_plan import BackwardPlan, ForwardShape, backward_plan, forward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_split import Split
from shardops.kernels.target import Target

Plans = tuple[Launch, ...]
MAX_PARTIALS = 16  # rows of partials a multiprocessor
LEAST_PART = 512  # columns of a row that many blocks share
LEAST_SHARED = 1 << 17  # columns of rows that all blocks of a launch may share


def plans_of(
    problem: NormProblem, backward: bool, geometry: ForwardShape | None, target: Target
) -> Plans:
    """The launches, in order; None is the plan's own choice of a shape."""
    plan = (backward_plan if backward else forward_plan)(problem, target, geometry)
    first = () if plan.sums is None else (plan.sums.launch,)
    last = (plan.finish,) if isinstance(plan, BackwardPlan) and plan.finish is not None else ()
    return *first, plan.main, *last


class NormRun:
    """Arrays of a problem, and calls that use them.

    Args:
      part: which of several sets of arrays, for problems so small that caches hold one.
    """

    def __init__(self, problem: NormProblem, backward: bool, target: Target, part: int = 0):
        self.problem, self.backward = problem, backward
        size, layer = problem.rows * problem.cols, problem.kind == "layer"

        def of(role: str, count: int = size, dtype: str = problem.x) -> jax.Array:
            return numbers(f"{role}, {part}", count, dtype)

        x, gamma = of("x"), of("gamma", problem.cols)
        mean, rstd = (jnp.full(problem.rows, v, jnp.float32) for v in (0.01, 1.0))
        beta = of("beta", problem.cols) if layer else None
        residual = of("residual") if problem.add else None
        out = of("out")
        in_pairs = problem.rows if problem.cols >= LEAST_SHARED else 1
        pairs = jnp.zeros((in_pairs, target.sm_count, 2), jnp.float32)
        sums_of_parts = of("parts", problem.rows * 3 * -(-problem.cols // LEAST_PART), "float32")
        if backward:
            rows_of_partials = problem.sums * min(problem.rows, target.sm_count * MAX_PARTIALS)
            partials = of("partials", rows_of_partials * problem.cols, "float32")
            sums = [of(f"sum {i}", problem.cols, "float32") for i in range(problem.sums)]
            known = [of("dy"), x, gamma, mean if layer else None, rstd]
            self.operands = {
                "sums": [*known, sums_of_parts],
                "main": [*known, residual, out, partials],
                "split": [*known, residual, sums_of_parts, out, partials],
                "finish": [partials, *sums],
                "resident": [*known, residual, out, *sums, pairs],
            }
            self.results = [(out, size), *((each, problem.cols) for each in sums)]
        else:
            statistics = [mean, rstd] if layer else [rstd]
            hidden = [of("h")] if problem.add else []
            self.operands = {
                "sums": [x, residual, *hidden, sums_of_parts],
                "main": [x, gamma, beta, residual, out, *hidden, *statistics],
                "split": [*(hidden or [x]), gamma, beta, sums_of_parts, out, *statistics],
                "resident": [x, gamma, beta, residual, out, *hidden, *statistics, pairs],
            }
            self.results = [(out, size), *((h, size) for h in hidden)]
            self.results += [(each, problem.rows) for each in statistics]
        jax.block_until_ready(self.operands)

    @property
    def bytes(self) -> int:
        """What must move: rows once in, once out."""
        problem = self.problem
        arrays = (3 + problem.add) if self.backward else (2 + 2 * problem.add)
        return arrays * problem.rows * problem.cols * jnp.dtype(problem.x).itemsize

    def calls(self, device: Device, plans: Plans, cubins: tuple[bytes, ...]) -> list[Call]:
        rows = np.int64(self.problem.rows)
        found = []
        for launch, cubin in zip(plans, cubins, strict=True):
            part = launch.kernel.name.split("_")[-1]
            part = part if part in self.operands else "main"
            scalars: list[Any] = [rows]
            if part == "finish":
                scalars = [np.int32(self.groups(plans[-2]))]
            elif not self.backward and part != "sums":
                scalars.append(np.float32(1e-6))
            arrays = [array for array in self.operands[part] if array is not None]
            zeroed = arrays[-1:] if launch.zeroed else ()
            found.append(Call(device, launch, cubin, arrays, scalars, zeroed))
        return found

    def groups(self, main: Launch) -> int:
        """Rows of partials that a backward launch writes."""
        if not main.kernel.name.endswith("_split"):
            return main.grid[0] // main.cluster[0]
        return main.grid[0] // Split(main.block[0], 1).column_blocks(self.problem)

    def poison(self, device: Device) -> None:
        for array, _ in self.results:
            device.poison(array)

    def values(self) -> list[np.ndarray]:
        """The first rows of the results, and the sums over rows: to compare candidates by."""
        rows = 64 * self.problem.cols
        copies = [jnp.array(array[: min(size, rows)]) for array, size in self.results]
        return [np.asarray(copy).astype(np.float32) for copy in copies]


def launched(calls: list[Call]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def relative_error(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Of the worst result, to the largest number in it."""
    pairs = zip(got, want, strict=True)
    return max(float(np.abs(g - w).max() / max(np.abs(w).max(), 1e-9)) for g, w in pairs)
