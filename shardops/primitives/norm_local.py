"""The norms on one device: the jnp reference, which says what they mean, and the kernels."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from shardops.kernels import norm as kernels
from shardops.primitives.local import local_primitive
from shardops.primitives.quantize_local import Form, local_quantize, problem_of, quantized
from shardops.rules.spec import Axes

Kind = Literal["layer", "rms"]


class Pulled(NamedTuple):
    """What is known of the gradient when the forward is lowered: its kernels are begun then.

    Args:
      residual: whether a cotangent of h joins dx.
    """

    residual: bool


def _mean(x: jax.Array, axes: Axes) -> jax.Array:
    """The mean over the last dim, of which each device along `axes` has an equal part."""
    mean = jnp.mean(x, -1)
    return jax.lax.pmean(mean, axes) if axes else mean


def _scale(gamma: jax.Array, zero_centered: bool, rank: int) -> jax.Array:
    """What x̂ is multiplied with, of as many dims: ranks are not promoted, which may be refused."""
    return _of_rank(rank, gamma) + (1.0 if zero_centered else 0.0)


def _of_rank(rank: int, of_columns: jax.Array) -> jax.Array:
    return jnp.expand_dims(of_columns.astype(jnp.float32), tuple(range(rank - 1)))


def _sum(x: jax.Array, add: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) + add.astype(jnp.float32)).astype(x.dtype)


def forward_reference(
    x: jax.Array,
    gamma: jax.Array,
    *extra: jax.Array,
    kind: Kind,
    beta: bool,
    add: bool,
    epsilon: float,
    zero_centered_gamma: bool,
    axes: Axes = (),
    form: Form | None = None,
    wide: bool = False,
    pulled: Pulled | None = None,
) -> tuple[jax.Array, ...]:
    """The norm in jnp: what the kernel computes, and what a CPU runs.

    Quantised (`form`, its scale the last of `extra`) are the float32 values of y, which are never
    rounded to the dtype of x: in the place of y are the results of `quantized`. `wide`: y stays
    in float32. `pulled` is for the kernel.
    """
    del pulled
    rest = iter(extra)
    shift = next(rest) if beta else None
    h = x
    if add:
        h = _sum(x, next(rest))
    values = h.astype(jnp.float32)
    mean = _mean(values, axes) if kind == "layer" else None
    centred = values if mean is None else values - mean[..., None]
    rstd = jax.lax.rsqrt(_mean(jnp.square(centred), axes) + epsilon)
    y = centred * rstd[..., None] * _scale(gamma, zero_centered_gamma, x.ndim)
    if shift is not None:
        y = y + _of_rank(x.ndim, shift)
    residual = (h,) if add else ()
    results = _written(y, x.dtype, rest, form, wide)
    return (*results, *residual, *(() if mean is None else (mean,)), rstd)


def _forward_results(
    x: Any, gamma: Any, *extra: Any, form: Form | None = None, wide: bool = False, **statics: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    if form is not None:
        quantised = partial(forward_reference, **statics, form=form, wide=wide)
        return tuple(jax.eval_shape(quantised, x, gamma, *extra))
    y = jax.ShapeDtypeStruct(x.shape, jnp.float32 if wide else x.dtype)
    of_rows = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    h = (jax.ShapeDtypeStruct(x.shape, x.dtype),) * statics["add"]
    return (y, *h, *(of_rows,) * (2 if statics["kind"] == "layer" else 1))


def _backward_results(
    dy: Any, h: Any, gamma: Any, *extra: Any, beta: bool, **statics: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    dx = jax.ShapeDtypeStruct(h.shape, h.dtype)
    return (dx, *(jax.ShapeDtypeStruct(gamma.shape, jnp.float32),) * (1 + beta))


def _written(
    y: jax.Array, dtype: Any, scales: Iterator[jax.Array], form: Form | None, wide: bool
) -> tuple[jax.Array, ...]:
    """What is written of y, float32."""
    if form is None:
        return (y if wide else y.astype(dtype),)
    # Rounding has no derivative: that of y goes beside it.
    return quantized(jax.lax.stop_gradient(y), *scales, form=form)


def backward_reference(
    dy: jax.Array,
    h: jax.Array,
    gamma: jax.Array,
    *extra: jax.Array,
    kind: Kind,
    beta: bool,
    residual: bool,
    zero_centered_gamma: bool,
    axes: Axes = (),
) -> tuple[jax.Array, ...]:
    """The norm's gradient in jnp.

    dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)) + dh,  g = dy · gamma,  x̂ = (h - mean) · rstd;
    dgamma = sum over rows of dy · x̂,  dbeta = sum over rows of dy. RMSNorm has no mean(g).
    """
    rest = iter(extra)
    wide, dwide = h.astype(jnp.float32), dy.astype(jnp.float32)
    if kind == "layer":
        wide = wide - next(rest)[..., None]
    rstd = next(rest)[..., None]
    unit = wide * rstd
    g = dwide * _scale(gamma, zero_centered_gamma, h.ndim)
    if kind == "layer":
        both = _mean(jnp.stack([g, g * unit]), axes)[..., None]
        dx = rstd * (g - both[0] - unit * both[1])
    else:
        dx = rstd * (g - unit * _mean(g * unit, axes)[..., None])
    if residual:
        dx = dx + next(rest).astype(jnp.float32)
    rows = tuple(range(h.ndim - 1))
    sums = [jnp.sum(dwide * unit, rows)] + ([jnp.sum(dwide, rows)] if beta else [])
    return (dx.astype(h.dtype), *sums)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _forward_kernel(
    x: jax.Array,
    gamma: jax.Array,
    *extra: jax.Array,
    beta: bool,
    add: bool,
    form: Form | None = None,
    wide: bool = False,
    pulled: Pulled | None = None,
    **statics: Any,
) -> tuple[jax.Array, ...]:
    if pulled is not None:
        kernels.begin_backward(
            _flat(x),
            gamma,
            kind=statics["kind"],
            zero_centered_gamma=statics["zero_centered_gamma"],
            beta=beta,
            residual=pulled.residual,
        )
    rest = iter(extra)
    shift = next(rest) if beta else None
    residual = next(rest) if add else None
    if form is not None or wide:
        scale = next(rest) if form is not None and form.given else None
        return _quantized_kernel(x, gamma, shift, residual, scale, form, statics)
    flat = None if residual is None else _flat(residual)
    results = kernels.norm_forward(_flat(x), gamma, shift, flat, **statics)
    return tuple(r.reshape(x.shape if r.ndim == 2 else x.shape[:-1]) for r in results)


def _quantized_kernel(
    x: jax.Array,
    gamma: jax.Array,
    shift: jax.Array | None,
    residual: jax.Array | None,
    scale: jax.Array | None,
    form: Form | None,
    statics: dict[str, Any],
) -> tuple[jax.Array, ...]:
    """y quantised, in one launch or two that write no y; without a form, y in float32."""
    from shardops.kernels import norm_quantized

    arrays = [a for a in (x, gamma, shift, residual) if a is not None]
    given = [] if scale is None else [scale]
    optional = {"beta": shift is not None, "add": residual is not None}
    reference = partial(forward_reference, **optional, **statics, form=form, wide=form is None)
    results = jax.eval_shape(reference, *arrays, *given)
    written = None if form is None else problem_of(form, x.shape, x.dtype.name)
    fused = norm_quantized.norm_quantized(
        x, gamma, shift, residual, scale, written, results, **statics
    )
    if fused is not None:
        return fused
    if form is not None:
        y, *others = _quantized_kernel(x, gamma, shift, residual, None, None, statics)
        return (*local_quantize(y, *given, form=form, kernel=True), *others)
    # Rows too long for the kernel that writes y in float32: the norm's own, of h in float32.
    h = x
    if residual is not None:
        # XLA would drop the cast to 16 bits and back, and the norm be of another h.
        h = jax.lax.optimization_barrier(_sum(x, residual))
    y, *values = kernels.norm_forward(_flat(h.astype(jnp.float32)), gamma, shift, None, **statics)
    values = [v.reshape(x.shape[:-1]) for v in values]
    return (y.reshape(x.shape), *(() if residual is None else (h,)), *values)


def _backward_kernel(
    dy: jax.Array,
    h: jax.Array,
    gamma: jax.Array,
    *extra: jax.Array,
    residual: bool,
    kind: Kind,
    **statics: Any,
) -> tuple[jax.Array, ...]:
    rest = iter(extra)
    mean = next(rest).reshape(-1) if kind == "layer" else None
    rstd = next(rest).reshape(-1)
    dh = _flat(next(rest)) if residual else None
    dx, *sums = kernels.norm_backward(
        _flat(dy), _flat(h), gamma, mean, rstd, dh, kind=kind, **statics
    )
    return (dx.reshape(h.shape), *sums)


local_forward = local_primitive(
    "shardops_norm_forward", forward_reference, _forward_kernel, results_of=_forward_results
)
local_backward = local_primitive(
    "shardops_norm_backward", backward_reference, _backward_kernel, results_of=_backward_results
)
