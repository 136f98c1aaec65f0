"""LayerNorm and RMSNorm with quantised results on the GPU: called while JAX lowers."""

from collections.abc import Sequence

import jax
import numpy as np

from shardops.kernels import launch
from shardops.kernels.norm import Kind
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import QuantizedNorm, quantized_forward_plan
from shardops.kernels.quantize_plan import QuantizeProblem, joined, written_layouts
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
    Returns: the results; None where no kernel does so (`quantized_forward_plan`).
    """
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
    vectors = [vector for vector in (gamma, beta) if vector is not None]
    given = [] if scale_inv is None else [scale_inv]
    residual = [] if add is None else [add]
    rows = np.int64(problem.norm.rows)
    entries = 1 if written is None else written.entries
    of_rows = [rows, rows // entries, np.float32(epsilon)]
    if plan.tile is None or written is None:
        return launch.call(plan.main, [x, *vectors, *residual, *given], results, of_rows)
    tiles = joined(written, target)
    of_tiles = [tiles.shape(plan.tile), np.float32(epsilon)]
    layouts = written_layouts(tiles, [r.shape for r in results])
    if plan.statistics is None:
        operands = [x, *vectors, *residual, *given]
        return launch.call(plan.main, operands, results, of_tiles, layouts)
    found = 1 + (add is not None) + (kind == "layer")  # h, mean, rstd
    others = launch.call(plan.statistics, [x, *residual], results[-found:], of_rows)
    h, *statistics = others if residual else (x, *others)
    operands = [h, *vectors, *given, *statistics]
    quantised = launch.call(plan.main, operands, results[:-found], of_tiles, layouts[:-found])
    return (*quantised, *others)
