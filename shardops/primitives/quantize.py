"""Quantisation of an array to 8 bits by a quantiser."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardops import config, routing
from shardops.errors import wrong
from shardops.fusing.marking import markable
from shardops.op import Arrays, compiled, with_derivative
from shardops.primitives import check
from shardops.primitives.quantize_local import Form
from shardops.primitives.quantize_op import MagnitudesOp, QuantizeOp
from shardops.primitives.saved import packed, unpacked
from shardops.primitives.scaled import ScaledArray, ScalingMode
from shardops.primitives.scaling import FORMATS, tensor_scale_inv
from shardops.quantizer import Quantizer
from shardops.rules.quantize import Blocks

QUANTIZED = "shardops.quantized"  # the name of data and scales, for policies of `jax.checkpoint`


def quantize(x: jax.Array, quantizer: Quantizer) -> ScaledArray:
    """Quantise an array.

        data = round(clip(x * (1 / scale_inv), -fmax, fmax)),  fmax the format's largest value

    Product and inverse are rounded to float32.

    | mode           | scale_inv                                                                 |
    |----------------|---------------------------------------------------------------------------|
    | TENSOR_DELAYED | the quantiser's, from steps before; `amax` tells it of this one           |
    | TENSOR_CURRENT | largest magnitude of x / fmax                                             |
    | BLOCK_128      | the same of each block of 128, or of 128 x 128                            |
    | MXFP8          | 2^(floor(log2(largest magnitude)) - floor(log2(fmax))) of each block of 32 |

    Beyond fmax values saturate, infinities too; NaN stays. Neither counts for a scale, which is
    always finite and never 0 or subnormal; of zeros it is 1, under MXFP8 2^-126, the least there.
    The gradient is straight-through: the cotangent of `dequantize` is that of x as it is. `data`
    and scales used by hand have none.

    Args:
      x: float32 | bfloat16 | float16. [*rows, h], or any shape where one scale serves it.
      quantizer: of a recipe in `so.recipes`. Its layout says what is written: "rows", x as it is,
        blocks along h; "columns", the transposed part [h, *rows], blocks along the last of the
        rows' dims; or "both".
    Returns: a ScaledArray of the shape and dtype of x. Its `amax` is the largest magnitude, NaN or
      infinity where an element is so; None for blocks.
    Raises: TypeError for dtypes and other quantisers, ValueError for shapes that a layout or a
      block does not have.
    Sharding: data follow x; scales of blocks as their blocks lie. One all-reduce of one number
      (TENSOR_DELAYED) or of two (TENSOR_CURRENT) over all axes that shard x; blocks move nothing
      where each lies on one device, else x is gathered along the dims whose shards break one. Along
      manual axes of a `shard_map` the array is the shard, and so is what `amax` covers.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; DeepSeek-AI 2024,
      https://arxiv.org/abs/2412.19437, section 3.3; OCP Microscaling Formats (MX) 1.0, section 6.3.
    """
    (x,) = check.arrays("quantize", x=x)
    form = form_of("quantize", "x", x.shape, quantizer)
    op = QuantizeOp(form, config.runs_as_kernel("quantize"))
    # Outside of what has a derivative of its own: the cotangent of x is that of `straight`.
    straight = _straight(Straight(), None, x)
    return named(replace(_compiled_quantize(op, None, x, quantizer.scale_inv), straight=straight))


def form_of(op: str, argument: str, shape: tuple[int, ...], quantizer: Any) -> Form:
    """What is static of the quantised array; refuses a quantiser that does not fit the shape."""
    if not isinstance(quantizer, Quantizer):
        fix = "Take one of a recipe: so.recipes.CurrentScaling().quantizer(role='input')."
        raise TypeError(wrong(op, "quantizer", f"a {type(quantizer).__name__}", "a Quantizer", fix))
    _check_made(quantizer)
    block, layout = quantizer.block, quantizer.layout
    least = 2 if layout != "rows" or (block and block[0] > 1) else 1 if block else 0
    if len(shape) < least:
        what = f"layout {layout!r}" if layout != "rows" else f"blocks of {block}"
        want = f"at least {least} dims for {what}"
        fix = "Reshape it, or take a quantizer of one scale with layout='rows'."
        raise ValueError(wrong(op, argument, f"of shape {shape}", want, fix))
    return Form(quantizer.format, quantizer.mode, Blocks(layout, block))


def _check_made(quantizer: Quantizer) -> None:
    """Refuses one that no recipe makes: its class is public."""
    check.one_of("Quantizer", "mode", quantizer.mode, [m for m in ScalingMode if m.name != "NONE"])
    check.one_of("Quantizer", "format", quantizer.format, FORMATS)
    check.one_of("Quantizer", "layout", quantizer.layout, ("rows", "columns", "both"))
    blocks = quantizer.mode in (ScalingMode.BLOCK_128, ScalingMode.MXFP8)
    fix = "Take one of a recipe: so.recipes.CurrentScaling().quantizer(role='input')."
    if blocks != (quantizer.block is not None):
        want = "two numbers" if blocks else "None"
        got = f"{quantizer.block} with mode {quantizer.mode.name}"
        raise ValueError(wrong("Quantizer", "block", got, want, fix))
    if quantizer.mode is ScalingMode.TENSOR_DELAYED and quantizer.scale_inv is None:
        raise ValueError(wrong("Quantizer", "scale_inv", "None", "its scale, float32", fix))


def named(scaled: ScaledArray) -> ScaledArray:
    """With names for policies of `jax.checkpoint`: these see none inside of a custom derivative."""
    fields = ["data", "transposed_data", "transposed_scale_inv"]
    fields += [] if scaled.block is None else ["scale_inv"]
    given = {name: getattr(scaled, name) for name in fields}
    return replace(scaled, **{k: _named_field(a) for k, a in given.items() if a is not None})


def _named_field(array: jax.Array) -> jax.Array:
    powers_of_two = array.dtype == jnp.float8_e8m0fnu  # which have no cotangent of zeros
    return _with_name(array) if powers_of_two else _named(None, None, array)


@with_derivative
def _named(_: None, __: None, array: jax.Array) -> jax.Array:
    return _with_name(array)


def _with_name(array: jax.Array) -> jax.Array:
    return unpacked(checkpoint_name(packed(array), QUANTIZED))


# The derivative exists so that products of quantised arrays see that one is asked for.
_named.defvjp(
    lambda _, __, array: (_with_name(array), None), lambda _, __, saved, darray: (darray,)
)


def assembled(
    form: Form, results: Arrays, scale_inv: Any, amax: Any, straight: jax.Array
) -> ScaledArray:
    """A ScaledArray of the results of an op."""
    parts = dict(zip(form.results, results, strict=True))
    return ScaledArray(
        parts.get("data"),
        scale_inv if form.given else parts.get("scales"),
        parts.get("amax", amax),
        form.mode,
        straight.dtype,
        form.blocks.of_rows(straight.ndim),
        parts.get("transposed data"),
        parts.get("transposed scales"),
        straight,
    )


def quantized_by(op: QuantizeOp, x: jax.Array, scale_inv: Any, straight: jax.Array) -> ScaledArray:
    """The routed op: without a derivative. Current scaling looks for the scale first."""
    form, amax = op.form, None
    if form.mode is ScalingMode.TENSOR_CURRENT:
        (both,) = routing.run(MagnitudesOp(op.kernel), (x,), ())
        amax, scale_inv = both[0], tensor_scale_inv(both[1], form.format)
    operands = (x, scale_inv) if form.given else (x,)
    return assembled(form, routing.run(op, operands, ()), scale_inv, amax, straight)


def _quantize(op: QuantizeOp, _: None, x: jax.Array, scale_inv: Any) -> ScaledArray:
    """Without `straight`."""
    return unpacked(_packed_quantize(op, None, x, scale_inv))


@with_derivative
def _packed_quantize(op: QuantizeOp, _: None, x: jax.Array, scale_inv: Any) -> ScaledArray:
    """Rounding has no derivative: it is that of nothing."""
    scaled = replace(quantized_by(op, x, scale_inv, x), straight=None)
    return packed(scaled, powers_of_two_alone=True)


_packed_quantize.defvjp(
    lambda op, _, x, scale_inv: (_packed_quantize(op, None, x, scale_inv), None),
    lambda op, _, saved, cotangents: (None, None),
)
_compiled_quantize = markable(compiled(_quantize))


@dataclass(frozen=True)
class Straight:
    """What `fuse` knows a use of x by that is for the cotangent alone, not for the values."""

    scope: str = "shardops.straight"


_straight = markable(lambda _, __, x: x)
