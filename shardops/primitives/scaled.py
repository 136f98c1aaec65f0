"""Quantised arrays with their scales, and the jnp reference that makes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardops import array_type, routing
from shardops.errors import shown, wrong
from shardops.op import with_derivative
from shardops.primitives.scaling import (
    FORMATS,
    ScalingMode,
    exponent_of,
    exponent_of_fmax,
    factors,
    joined,
    largest,
    largest_finite,
    moved,
    power_of_two,
    saturated,
    split,
    spread,
    tensor_scale_inv,
)

_ARRAYS = ("data", "scale_inv", "amax", "transposed_data", "transposed_scale_inv", "straight")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=_ARRAYS,
    meta_fields=("mode", "dtype", "block"),
)
@dataclass(frozen=True, eq=False)
class ScaledArray:
    """A quantised array with its scales: value = data * scale_inv, each scale over its block.

    A pytree: it passes through `jit`, `scan`, `checkpoint`, `tree.map` and `device_put`, and each
    of its arrays has a sharding of its own. Under a transformation that adds leading dims all of
    them have these, and a scale covers one entry along each.

    It may hold the array a second time, or only so, with the last dim in front of the others, for
    products that contract these. `transposed` is that part. Two are equal (==) that are the same
    object: compare their arrays.

    Attributes:
      data: float8_e4m3fn | float8_e5m2; of dtype `dtype` where the mode is NONE; None where there
        is only the transposed part.
      scale_inv: float32 of rank 0 for a scale of the array; float32 for BLOCK_128 and
        float8_e8m0fnu for MXFP8, one a block, a partial block at the end of a dim included; None
        for NONE, and for blocks where there is only the transposed part.
      amax: the largest magnitude, float32 of rank 0, NaN or infinity where an element is so; None
        for scales of blocks and for NONE.
      mode: where the scales come from and what they cover.
      dtype: of the array that this one stands for.
      block: how many elements a scale of `data` covers, one number a dim; None: all.
      transposed_data: [h, *rows] of an array [*rows, h]: for a scale of the array, and for blocks
        of 128 x 128, the numbers of `data`; other blocks lie along the last of the rows' dims, so
        that these numbers are quantised by other scales.
      transposed_scale_inv: one a block of `transposed_data`; None where `scale_inv` serves both.
      straight: where the cotangent of this array goes: of its shape and dtype, and its values are
        of no account. None: this array is a constant.
    """

    data: jax.Array | None
    scale_inv: jax.Array | None
    amax: jax.Array | None
    mode: ScalingMode
    dtype: np.dtype[Any]
    block: tuple[int, ...] | None = None
    transposed_data: jax.Array | None = None
    transposed_scale_inv: jax.Array | None = None
    straight: jax.Array | None = None

    def __post_init__(self) -> None:
        # Statics that are equal have to compare so: jnp.bfloat16 and its dtype, lists and tuples.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.block is not None:
            object.__setattr__(self, "block", tuple(self.block))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that this one stands for."""
        if self.data is not None:
            return self.data.shape
        shape, first = self._whole.shape, self._added
        return (*shape[:first], *shape[first + 1 :], shape[first])

    @property
    def ndim(self) -> int:
        """Of the array that this one stands for."""
        return len(self.shape)

    @property
    def transposed(self) -> "ScaledArray | None":
        """The array with its last dim in front of the others, from `transposed_data`."""
        if self.transposed_data is None:
            return None
        scale, block = self.transposed_scale_inv, self.block
        # Blocks of one dim lie along the last dim of either part.
        if block is not None and sum(b > 1 for b in block) > 1:
            block = (block[-1], *block[:-1])
        straight = self.straight
        if straight is not None:
            straight = moved(straight, -1, self._added)
        return ScaledArray(
            self.transposed_data,
            self.scale_inv if scale is None else scale,
            None,
            self.mode,
            self.dtype,
            block,
            straight=straight,
        )

    def upright(self) -> "ScaledArray":
        """This array with `data`: where there is only the transposed part, 8 bits are transposed.

        The values are those of the transposed part, and so are the blocks that a scale covers.
        """
        part = self.transposed
        if self.data is not None or part is None:
            return self
        block, at = part.block, self._added

        data = moved(part.data, at, -1)
        if block is None:
            return replace(self, data=data)
        block = (*block[1:], block[0])
        return replace(self, data=data, scale_inv=moved(part.scale_inv, at, -1), block=block)

    def detach(self) -> "ScaledArray":
        """This array as a constant, without `straight`: to keep it from one step to another."""
        return jax.tree.map(jax.lax.stop_gradient, replace(self, straight=None))

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """Multiply by the scales, in float32.

        The cotangent goes to the array that was quantised as it is (straight-through).

        Args:
          dtype: of the result; None: the dtype that this array stands for.
        Returns: an array of shape `shape`.
        """
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if self.data is None:
            return self.upright().dequantize(dtype)
        value = _dequantized(self.data, self.scale_inv, self.block, dtype)
        if self.straight is None:
            return value
        return _through(None, None, *routing.match_varying(self.straight, value))

    @property
    def _whole(self) -> jax.Array:
        if self.transposed_data is None:
            raise ValueError("ScaledArray: data is None; expected it, or transposed_data.")
        return self.transposed_data

    @property
    def _added(self) -> int:
        """How many leading dims transformations have added."""
        if self.block is not None:
            return self._whole.ndim - len(self.block)
        return 0 if self.scale_inv is None else self.scale_inv.ndim


def _dequantized(
    data: jax.Array, scale_inv: jax.Array | None, block: tuple[int, ...] | None, dtype: Any
) -> jax.Array:
    if scale_inv is None:
        return data.astype(dtype)
    wide = data.astype(jnp.float32)
    for factor in factors(scale_inv):
        wide = wide * spread(factor, data, block)
    return wide.astype(dtype)


@with_derivative
def _through(_: Any, __: Any, straight: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, whose cotangent goes to `straight`."""
    return value


def _through_save(_: Any, __: Any, straight: jax.Array, value: jax.Array) -> Any:
    # Through `_through` again: its derivative serves gradients of gradients.
    return _through(None, None, straight, value), array_type.Type.of(straight)


_through.defvjp(_through_save, lambda _, __, to, dvalue: (to.apply(dvalue), None))


def quantize_reference(
    x: jax.Array,
    mode: ScalingMode,
    block: Sequence[int] | None = None,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    scale_inv: jax.Array | None = None,
) -> ScaledArray:
    """Quantise in plain jnp: what a kernel is to compute. A reference, not meant to be fast.

        data = round(clip(x * (1 / scale_inv), -fmax, fmax)),  fmax the largest value of `dtype`

    Scales of float32 put the largest magnitude they cover at fmax; those of MXFP8 are
    2^(floor(log2(amax)) - emax), emax the exponent of fmax, so that a magnitude above fmax
    saturates: an eighth of it is lost at most. A scale is always finite and not 0: elements that
    are infinite or NaN do not count, a float32 scale is 1 for zeros and never subnormal, an
    exponent is at least -126. Infinities saturate, NaN stays.

    Args:
      x: float32 | bfloat16 | float16, any shape.
      mode: NONE returns x as it is, wrapped.
      block: elements that a scale covers, one number a dim. BLOCK_128: 128 along one or two dims, 1
        along the others. MXFP8: 32 along one dim. None for the other modes.
      dtype: float8_e4m3fn | float8_e5m2.
      scale_inv: float32 of rank 0 for TENSOR_DELAYED, from `tensor_scale_inv` of an earlier amax.
    Raises: TypeError for dtypes, ValueError for a block or a scale_inv that the mode does not have.
    Sharding: data follow x. One all-reduce of two numbers over each axis that shards x, for the
      amax of the array; nothing where each block lies on one device, else x is gathered along the
      dims whose shards break one.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; OCP Microscaling Formats
      (MX) 1.0, section 6.3.
    """
    x = jnp.asarray(x)
    name = _checked(x, mode, block, dtype, scale_inv)
    if mode is ScalingMode.NONE:
        return ScaledArray(x, None, None, mode, x.dtype)
    wide = x.astype(jnp.float32)
    if block is None:
        amax = largest(wide)
        if scale_inv is None:
            scale_inv = tensor_scale_inv(largest_finite(wide), name)
        scale_inv = jnp.asarray(scale_inv, jnp.float32)
        data = saturated(wide * (1 / scale_inv), name)
        return ScaledArray(data, scale_inv, amax, mode, x.dtype)
    blocks, spec = split(wide, block), array_type.explicit_spec(x)
    within = tuple(range(1, blocks.ndim, 2))
    top = largest_finite(blocks, within)
    if mode is ScalingMode.MXFP8:
        exponent = exponent_of(top) - exponent_of_fmax(name)
        # The format's own least, 2^-127, is subnormal in float32, and where XLA moves such scales
        # by sums in float32 it comes out as NaN.
        exponent = jnp.maximum(exponent, -126)
        scale_inv = jax.lax.bitcast_convert_type(
            (exponent + 127).astype(jnp.uint8), jnp.float8_e8m0fnu
        )
        scaled = blocks * jnp.expand_dims(power_of_two(-exponent), within)
    else:
        scale_inv = tensor_scale_inv(top, name)
        scaled = blocks * jnp.expand_dims(1 / scale_inv, within)
    data = joined(saturated(scaled, name), x.shape)
    data = data if spec is None else array_type.laid_out(data, spec)
    return ScaledArray(data, scale_inv, None, mode, x.dtype, tuple(block))


# ---- checks --------------------------------------------------------------------------------------


def _checked(x: jax.Array, mode: Any, block: Any, dtype: Any, scale_inv: Any) -> str:
    """The name of the format."""
    op = "quantize"
    if not isinstance(mode, ScalingMode):
        want = " | ".join(str(m) for m in ScalingMode)
        raise ValueError(wrong(op, "mode", shown(mode), want, "Choose one of these."))
    if x.dtype.name not in ("float32", "bfloat16", "float16"):
        want = "float32 | bfloat16 | float16"
        raise TypeError(wrong(op, "x", f"of dtype {x.dtype}", want, "Cast x first."))
    name = jnp.dtype(dtype).name
    if name not in FORMATS:
        raise TypeError(wrong(op, "dtype", name, " | ".join(FORMATS), "Choose one of these."))
    _check_block(op, x, mode, block)
    if (scale_inv is not None) != (mode is ScalingMode.TENSOR_DELAYED):
        got = "None" if scale_inv is None else "given"
        want = f"{'None' if scale_inv is not None else 'an array'} for {mode}"
        fix = "Delayed scaling alone takes a scale: that of the steps before."
        raise ValueError(wrong(op, "scale_inv", got, want, fix))
    if scale_inv is not None and jnp.shape(scale_inv) != ():
        got = f"of shape {jnp.shape(scale_inv)}"
        raise ValueError(wrong(op, "scale_inv", got, "()", "One scale serves the array."))
    return name


def _check_block(op: str, x: jax.Array, mode: ScalingMode, block: Any) -> None:
    size, most = {ScalingMode.BLOCK_128: (128, 2), ScalingMode.MXFP8: (32, 1)}.get(mode, (0, 0))
    dims = () if block is None else tuple(block)
    good = block is None
    if size:
        good = len(dims) == x.ndim and {*dims} <= {1, size} and 1 <= dims.count(size) <= most
    if not good:
        along = "one dim" if most == 1 else "one or two dims"
        want = f"{size} along {along} of x {x.shape}, 1 along the others" if size else "None"
        fix = f"{mode} has such blocks." if size else f"{mode} has one scale or none."
        raise ValueError(wrong(op, "block", shown(block), want, fix))
