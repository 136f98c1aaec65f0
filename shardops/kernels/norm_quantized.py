"""LayerNorm and RMSNorm with quantised results on the GPU: called while JAX lowers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import launch
from shardops.kernels.norm import Kind
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import (
    QuantizedNorm,
    params_of,
    quantized_forward_plan,
)
from shardops.kernels.quantize_plan import QuantizeProblem, joined
from shardops.kernels.target import current_target


def norm_quantized(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    add: jax.Array | None,
    scale_inv: jax.Array | None,
    written: QuantizeProblem | None,
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    kind: Kind,
    epsilon: float,
    zero_centered_gamma: bool,
) -> tuple[jax.Array, ...] | None:
    """Normalises rows, and quantises the float32 values.

    Args:
      x, gamma, beta, add: as of `norm_forward`; x and add of any rank.
      scale_inv: one float32 an entry of `written`, where scales are those of entries.
      written: what of y; None: y itself in float32.
      results: those of `written` (or y), h, mean, rstd, as far as there are any.
    Returns: the results; None where no kernel writes float32 rows so long.
    """
    written = None if written is None else joined(written)
    problem = QuantizedNorm(
        NormProblem(
            x.size // x.shape[-1],
            x.shape[-1],
            kind=kind,
            x=x.dtype.name,
            gamma=gamma.dtype.name,
            beta=None if beta is None else beta.dtype.name,
            add=add is not None,
            zero_centered=zero_centered_gamma,
        ),
        written,
    )
    target = current_target()
    plan = quantized_forward_plan(problem, target)
    if plan is None:
        return None
    operands = [operand for operand in (x, gamma, beta, add, scale_inv) if operand is not None]
    rows = problem.norm.rows
    if written is None or plan.kernel.name == "norm_quantized":
        entries = 1 if written is None else written.entries
        scalars = [np.int64(rows), np.int64(rows // entries), np.float32(epsilon)]
        return launch.call(plan, operands, results, scalars)
    ready = jax.ShapeDtypeStruct((written.slabs,), jnp.uint32)
    params = params_of(written, epsilon, target)
    return launch.call(plan, operands, [*results, ready], [params])[:-1]
