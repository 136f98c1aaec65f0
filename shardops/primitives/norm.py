"""LayerNorm and RMSNorm. The residual's sum before and its cotangent after are fused in."""

from dataclasses import replace
from typing import Any

import jax

from shardops import array_type, config, routing
from shardops.errors import wrong
from shardops.fusing.marking import markable
from shardops.op import Wanted, compiled, with_derivative
from shardops.primitives import check
from shardops.primitives.norm_op import Kind, NormBackward, NormForward, Pulled
from shardops.primitives.quantize import assembled, form_of, named, quantized_by
from shardops.primitives.quantize_op import QuantizeOp
from shardops.primitives.saved import packed, unpacked
from shardops.primitives.scaling import ScalingMode
from shardops.quantizer import Quantizer
from shardops.rules.rowwise import Stats


def layer_norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None = None,
    *,
    add: jax.Array | None = None,
    return_input: bool = False,
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    quantizer: Quantizer | None = None,
    stats: Stats = "auto",
) -> Any:
    """Normalise each row to mean 0 and variance 1, then scale and shift.

        h = x + add
        y[r, h] = (h[r, h] - mean_h(h[r, h])) / sqrt(var_h(h[r, h]) + epsilon) * gamma[h] + beta[h]

    Statistics in float32: the mean first, then the mean of centred squares. `h` is rounded to the
    dtype of x before it is normalised, so that y is the norm of the `h` that is returned. A mean
    that is large beside the deviations is known to some roundings of its own, and so is y. Sums
    of a row beyond float32 are infinite, and its y NaN; so are sums of squares, of deviations
    about 1.8e19 / sqrt(columns), and its y 0.
    Derivatives of any order in reverse mode; no forward mode (`jax.jvp`, `jacfwd`): of `hessian`
    take `jacrev(jacrev(f))`.

    Args:
      x: [*rows, h] float32 | bfloat16 | float16.
      gamma: [h], any of these dtypes.
      beta: [h], any of these dtypes; None: no shift.
      add: [*rows, h], dtype of x: a residual, summed in float32 before the norm.
      return_input: also return h. Its cotangent is added to dx in the backward kernel.
      epsilon: added to the variance; >= 0.
      zero_centered_gamma: scale by 1 + gamma, added in float32.
      quantizer: of a recipe in `so.recipes`: y is a ScaledArray, quantised by it from float32, as
        `so.quantize` of the norm of a float32 x gives it. Its cotangent is that of y.
      stats: where an axis shards h: "distributed" combines the statistics over it, "gather" gathers
        x first, "auto" takes whichever moves less (distributed).
    Returns: y [*rows, h], dtype of x, or a ScaledArray of it; with return_input (y, h).
    Raises: TypeError for dtypes and quantisers, ValueError for shapes.
    Sharding: rows: any axes, no communication. h: one all-reduce of a number a row for the mean and
      one for the variance, or gathered. Gradients of gamma and beta: one all-reduce of both over
      the axes that shard rows, or one reduce-scatter where they are wanted sharded. quantizer: what
      `so.quantize` adds to that.
    Source: Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450
    """
    return _norm(
        "layer",
        x,
        gamma,
        beta,
        add,
        return_input=return_input,
        epsilon=epsilon,
        zero_centered_gamma=zero_centered_gamma,
        stats=stats,
        quantizer=quantizer,
    )


def rms_norm(
    x: jax.Array,
    gamma: jax.Array,
    *,
    add: jax.Array | None = None,
    return_input: bool = False,
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    quantizer: Quantizer | None = None,
    stats: Stats = "auto",
) -> Any:
    """Divide each row by its root mean square, then scale.

        h = x + add
        y[r, h] = h[r, h] / sqrt(mean_h(h[r, h]^2) + epsilon) * gamma[h]

    Statistics in float32. `h` is rounded to the dtype of x before it is normalised, so that y is
    the norm of the `h` that is returned. Sums of squares beyond float32, of values
    about 1.8e19 / sqrt(columns), are infinite, and such rows 0.
    Derivatives of any order in reverse mode; no forward mode (`jax.jvp`, `jacfwd`): of `hessian`
    take `jacrev(jacrev(f))`.

    Args:
      x: [*rows, h] float32 | bfloat16 | float16.
      gamma: [h], any of these dtypes.
      add: [*rows, h], dtype of x: a residual, summed in float32 before the norm.
      return_input: also return h. Its cotangent is added to dx in the backward kernel.
      epsilon: added to the mean square; >= 0.
      zero_centered_gamma: scale by 1 + gamma, added in float32.
      quantizer: of a recipe in `so.recipes`: y is a ScaledArray, quantised by it from float32, as
        `so.quantize` of the norm of a float32 x gives it. Its cotangent is that of y.
      stats: where an axis shards h: "distributed" combines the statistics over it, "gather" gathers
        x first, "auto" takes whichever moves less (distributed).
    Returns: y [*rows, h], dtype of x, or a ScaledArray of it; with return_input (y, h).
    Raises: TypeError for dtypes and quantisers, ValueError for shapes.
    Sharding: rows: any axes, no communication. h: one all-reduce of a number a row, or gathered.
      Gradient of gamma: one all-reduce over the axes that shard rows, or one reduce-scatter where
      it is wanted sharded. quantizer: what `so.quantize` adds to that.
    Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467
    """
    return _norm(
        "rms",
        x,
        gamma,
        None,
        add,
        return_input=return_input,
        epsilon=epsilon,
        zero_centered_gamma=zero_centered_gamma,
        stats=stats,
        quantizer=quantizer,
    )


def _norm(
    kind: Kind,
    x: Any,
    gamma: Any,
    beta: Any,
    add: Any,
    *,
    return_input: bool,
    epsilon: float,
    zero_centered_gamma: bool,
    stats: Stats,
    quantizer: Quantizer | None,
) -> Any:
    name = f"{kind}_norm"
    x, gamma, beta, add = check.arrays(name, x=x, gamma=gamma, beta=beta, add=add)
    if x.ndim == 0 or x.shape[-1] == 0:
        want = "[*rows, h] with h >= 1"
        raise ValueError(wrong(name, "x", f"of shape {x.shape}", want, "Give x a last dim."))
    check.shape(name, "gamma", gamma, x.shape[-1:])
    if beta is not None:
        check.shape(name, "beta", beta, x.shape[-1:])
    if add is not None:
        check.shape(name, "add", add, x.shape)
        if add.dtype != x.dtype:
            fix = "Cast `add`: h has the dtype of x."
            raise TypeError(wrong(name, "add", f"of dtype {add.dtype}", f"{x.dtype}", fix))
    check.one_of(name, "stats", stats, ("auto", "gather", "distributed"))
    form = None if quantizer is None else form_of(name, "x", x.shape, quantizer)
    op = NormForward(
        kind=kind,
        beta=beta is not None,
        add=add is not None,
        epsilon=check.epsilon(name, epsilon),
        zero_centered_gamma=check.flag(name, "zero_centered_gamma", zero_centered_gamma),
        stats=stats,
        kernel=config.runs_as_kernel(name),
        form=form,
    )
    every = (x, gamma, beta, add, *(() if quantizer is None else (quantizer.scale_inv,)))
    matched = iter(routing.match_varying(*(a for a in every if a is not None)))
    operands = [None if a is None else next(matched) for a in every]
    out = _compiled_norm(op, check.flag(name, "return_input", return_input), *operands)
    if form is None:
        return out
    return (named(out[0]), out[1]) if return_input else named(out)


def _normalise(op: NormForward, return_input: bool, *operands: Any) -> Any:
    """-> y, or (y, h)."""
    return unpacked(_packed_norm(op, return_input, *operands))


@with_derivative
def _packed_norm(
    op: NormForward, return_input: bool, x: Any, gamma: Any, beta: Any, add: Any, scale: Any = None
) -> Any:
    """Without `add`, h is x itself: its cotangent still joins dx in the kernel."""
    return _save(op, return_input, x, gamma, beta, add, scale)[0]


def _save(
    op: NormForward, return_input: bool, x: Any, gamma: Any, beta: Any, add: Any, scale: Any = None
) -> Any:
    operands = [a for a in (x, gamma, beta, add) if a is not None]
    y, h, mean, rstd = _forward(op, operands, scale)
    saved = (
        h,
        gamma,
        mean,
        rstd,
        *(None if a is None else array_type.Type.of(a) for a in (x, beta, add)),
    )
    return packed((y, h) if return_input else y, powers_of_two_alone=True), saved


def _forward(op: NormForward, operands: list[jax.Array], scale: Any) -> tuple[Any, Any, Any, Any]:
    """y, quantised or not, h, mean, rstd."""
    form, x = op.form, operands[0]
    if form is None:
        (y,), *rest = op.unpack(_run(op, (None,), *operands), x)
    elif form.mode is ScalingMode.TENSOR_CURRENT:
        # y has to be there before its scale is known.
        wide = replace(op, form=None, wide=True)
        (values,), *rest = wide.unpack(_run(wide, (None,), *operands), x)
        quantize = QuantizeOp(form, config.runs_as_kernel("quantize"))
        y = quantized_by(quantize, jax.lax.stop_gradient(values), None, values.astype(x.dtype))
    else:
        given = [scale] * form.given
        *results, straight = _run(op, (), *operands, *given)
        written, *rest = op.unpack(results, x)
        y = assembled(form, written, scale, None, straight)
    return (y, *rest)


def _pull(op: NormForward, return_input: bool, saved: Any, cotangents: Any) -> Any:
    h, gamma, mean, rstd, x_type, beta_type, add_type = saved
    dy, dh = cotangents if return_input else (cotangents, None)
    if op.form is not None:
        dy = dy.straight
    gamma_type = array_type.Type.of(gamma)
    backward = NormBackward(
        kind=op.kind,
        beta=op.beta,
        residual=return_input,
        zero_centered_gamma=op.zero_centered_gamma,
        stats=op.stats,
        kernel=config.runs_as_kernel(f"{op.kind}_norm.grad"),
        # Both parameters' sums are one collective, so both stay open or neither does.
        unreduced=tuple(a for a in gamma_type.unreduced if not op.beta or a in beta_type.unreduced),
    )
    operands = routing.match_varying(*(a for a in (dy, h, gamma, mean, rstd, dh) if a is not None))
    wanted = (x_type.spec, gamma_type.spec)
    with jax.named_scope(f"shardops.{op.kind}_norm.grad"):
        dx, dgamma, *dbeta = _run(backward, wanted, *operands)
        return (
            x_type.apply(dx),
            gamma_type.apply(dgamma),
            beta_type.apply(dbeta[0]) if dbeta else None,
            add_type.apply(dx) if add_type else None,
            None,
        )


def _save_for_gradient(op: NormForward, return_input: bool, *operands: Any) -> Any:
    """As `_save`, and the gradient's kernels are got ready together with the forward's."""
    if config.runs_as_kernel(f"{op.kind}_norm.grad"):
        op = replace(op, pulled=Pulled(residual=return_input))
    return _save(op, return_input, *operands)


_packed_norm.defvjp(_save_for_gradient, _pull)
_compiled_norm = markable(compiled(_normalise))


@with_derivative
def _run(op: NormForward | NormBackward, wanted: Wanted, *arrays: jax.Array) -> Any:
    """The routed op. Its own derivative, for gradients of gradients, is that of the reference.

    What stands for a quantised y has none: after the results comes an array of the type of y, of
    any values, whose cotangent is that of y.
    """
    results = routing.run(op, arrays, wanted)
    return (*results, arrays[0]) if isinstance(op, NormForward) and op.form else results


def _run_save(op: Any, wanted: Wanted, *arrays: jax.Array) -> Any:
    return _run(op, wanted, *arrays), arrays


def _run_pull(op: Any, wanted: Wanted, arrays: Any, cotangents: Any) -> Any:
    del wanted
    return routing.pull(op.reference, arrays, cotangents)


_run.defvjp(_run_save, _run_pull)
