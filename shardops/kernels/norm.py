"""LayerNorm and RMSNorm on the GPU, on one device's rows: called while JAX lowers."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import launch
from shardops.kernels.norm_plan import BackwardPlan, backward_plan, forward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.target import current_target

Kind = Literal["layer", "rms"]


def norm_forward(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    add: jax.Array | None,
    *,
    kind: Kind,
    epsilon: float,
    zero_centered_gamma: bool,
) -> tuple[jax.Array, ...]:
    """Normalises rows.

        h = x + add;  y = (h - mean) · rstd · gamma + beta

    Args:
      x: [rows, n] float32 | bfloat16 | float16; at least one row.
      gamma: [n]; beta: [n] or None; each of any of the three types.
      add: None, or as x.
    Returns: y as x; h as x, only with `add`; mean [rows] float32, only for "layer"; rstd [rows]
      float32. The statistics are those of the rounded h.
    """
    problem = NormProblem(
        *x.shape,
        kind=kind,
        x=x.dtype.name,
        gamma=gamma.dtype.name,
        beta=None if beta is None else beta.dtype.name,
        add=add is not None,
        zero_centered=zero_centered_gamma,
    )
    plan = forward_plan(problem, current_target())
    row_values = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    statistics = [row_values] * (1 + (kind == "layer"))
    hidden = [like_x] if add is not None else []
    scalars = [np.int64(problem.rows), np.float32(epsilon)]
    if plan.sums is None:
        operands = [operand for operand in (x, gamma, beta, add) if operand is not None]
        wanted = [like_x, *hidden, *statistics]
        pairs = [] if plan.pairs is None else [jax.ShapeDtypeStruct(plan.pairs, jnp.uint32)]
        return launch.call(plan.main, operands, [*wanted, *pairs], scalars)[: len(wanted)]
    launch.begin([plan.main])
    workspace = jax.ShapeDtypeStruct(plan.sums.workspace, jnp.float32)
    operands = [x] if add is None else [x, add]
    *h, moments = launch.call(plan.sums.launch, operands, [*hidden, workspace], scalars[:1])
    operands = [h[0] if h else x, gamma, *([] if beta is None else [beta]), moments]
    y, *of_rows = launch.call(plan.main, operands, [like_x, *statistics], scalars)
    return y, *h, *of_rows


def norm_backward(
    dy: jax.Array,
    x: jax.Array,
    gamma: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    dh: jax.Array | None,
    *,
    kind: Kind,
    zero_centered_gamma: bool,
    beta: bool,
) -> tuple[jax.Array, ...]:
    """Pulls a cotangent of y back.

    Args:
      dy: [rows, n], as x.
      x: [rows, n], what was normalised (h where there was a residual).
      mean: [rows] float32 for "layer", None for "rms"; rstd: [rows] float32.
      dh: None, or as x: a further cotangent of h, added to dx before its one rounding.
      beta: whether dbeta is wanted.
    Returns: dx as x; dgamma [n] float32; dbeta [n] float32, only with `beta`. dgamma and dbeta are
      sums over this device's rows.
    """
    problem = _backward_problem(
        x, gamma, kind=kind, zero_centered=zero_centered_gamma, beta=beta, residual=dh is not None
    )
    plan = backward_plan(problem, current_target())
    launch.begin(_launches(plan)[1:])
    rows = [np.int64(problem.rows)]
    operands = [operand for operand in (dy, x, gamma, mean, rstd) if operand is not None]
    last = [] if dh is None else [dh]
    if plan.sums is not None:
        of_parts = jax.ShapeDtypeStruct(plan.sums.workspace, jnp.float32)
        last += launch.call(plan.sums.launch, operands, [of_parts], rows)
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    parameters = [jax.ShapeDtypeStruct(gamma.shape, jnp.float32)] * problem.sums
    if plan.finish is None:
        pairs = jax.ShapeDtypeStruct(plan.workspace, jnp.uint32)
        *results, _ = launch.call(plan.main, [*operands, *last], [like_x, *parameters, pairs], rows)
        return tuple(results)
    workspace = jax.ShapeDtypeStruct(plan.workspace, jnp.float32)
    dx, partials = launch.call(plan.main, [*operands, *last], [like_x, workspace], rows)
    return dx, *launch.call(plan.finish, [partials], parameters, [np.int32(plan.workspace[1])])


def begin_backward(
    x: jax.Array,
    gamma: jax.Array,
    *,
    kind: Kind,
    zero_centered_gamma: bool,
    beta: bool,
    residual: bool,
) -> None:
    """Starts to get the kernels of `norm_backward`, whose call is lowered later."""
    problem = _backward_problem(
        x, gamma, kind=kind, zero_centered=zero_centered_gamma, beta=beta, residual=residual
    )
    launch.begin(_launches(backward_plan(problem, current_target())))


def _backward_problem(
    x: jax.Array, gamma: jax.Array, *, kind: Kind, zero_centered: bool, beta: bool, residual: bool
) -> NormProblem:
    return NormProblem(
        *x.shape,
        kind=kind,
        x=x.dtype.name,
        gamma=gamma.dtype.name,
        beta=gamma.dtype.name if beta else None,
        add=residual,
        zero_centered=zero_centered,
    )


def _launches(plan: BackwardPlan) -> list[launch.Launch]:
    sums = [] if plan.sums is None else [plan.sums.launch]
    return [*sums, plan.main, *([] if plan.finish is None else [plan.finish])]
