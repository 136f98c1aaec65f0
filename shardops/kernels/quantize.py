"""Quantisation on the GPU, of one device's array: called while JAX lowers."""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import launch
from shardops.kernels.quantize_plan import (
    QuantizeProblem,
    arranged,
    magnitudes_plan,
    quantize_plan,
    tiling,
    written_layouts,
)
from shardops.kernels.target import current_target


def quantize(
    x: jax.Array,
    scale_inv: jax.Array | None,
    problem: QuantizeProblem,
    results: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    """Quantises an array in one launch.

    Args:
      x: of the problem's shape, flat or not; float32 | bfloat16 | float16.
      scale_inv: one float32 an entry, where scales are those of entries.
      results: data, scales of blocks, both turned, amax, as far as the problem has them.
    """
    target = current_target()
    problem = arranged(problem, target)
    operands = [operand for operand in (x, scale_inv) if operand is not None]
    plan = quantize_plan(problem, target)
    layouts = written_layouts(problem, [r.shape for r in results])
    return launch.call(plan, operands, results, [problem.shape(tiling(problem))], layouts)


def magnitudes(x: jax.Array, added: int) -> jax.Array:
    """The largest magnitude, NaN or infinity where there is one, and that of finite elements.

    Returns: [*added dims of x, 2] float32.
    """
    entries, count = prod(x.shape[:added]), prod(x.shape[added:])
    plan, parts = magnitudes_plan(entries, count, x.dtype.name, current_target())
    result = jax.ShapeDtypeStruct((*x.shape[:added], 2), jnp.float32)
    (found,) = launch.call(plan, [x], [result], [np.int64(count), np.int32(parts)])
    return found
