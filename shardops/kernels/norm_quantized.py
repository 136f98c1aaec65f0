"""LayerNorm and RMSNorm with quantised results on the GPU: called while JAX lowers."""

from collections.abc import Sequence

import jax
import numpy as np

from shardops.kernels import launch
from shardops.kernels.norm import Kind
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import (
    QuantizedNorm,
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
    plans = quantized_forward_plan(problem, current_target())
    if not plans:
        return None
    vectors = [vector for vector in (gamma, beta) if vector is not None]
    residual = [] if add is None else [add]
    given = [] if scale_inv is None else [scale_inv]
    rows, cols = np.int64(problem.norm.rows), np.int64(problem.norm.cols)
    if len(plans) == 1 or written is None:
        entries = 1 if written is None else written.entries
        scalars = [rows, rows // entries, np.float32(epsilon)]
        return launch.call(plans[0], [x, *vectors, *residual, *given], results, scalars)
    found = len(residual) + 1 + (kind == "layer")  # h, mean, rstd
    statistics = launch.call(
        plans[0], [x, *residual], results[-found:], [rows, cols, np.float32(epsilon)]
    )
    h = statistics[0] if residual else x
    operands = [h, *vectors, *statistics[len(residual) :], *given]
    data = launch.call(plans[1], operands, results[:-found], [written.shape])
    return (*data, *statistics)
