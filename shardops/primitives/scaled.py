"""Quantised arrays with their scales, and the jnp reference that makes them."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardops import array_type
from shardops.errors import wrong
from shardops.rules.scales import scale_shape, scale_spec
from shardops.rules.spec import Spec, to_partition_spec

FORMATS = ("float8_e4m3fn", "float8_e5m2")
_TINY = float(np.finfo(np.float32).tiny)  # smaller ones are flushed to 0 on some devices


class ScalingMode(enum.Enum):
    """What one scale of a quantised array covers, and where it comes from.

    | mode           | a scale covers                    | scales        | found from             |
    |----------------|-----------------------------------|---------------|------------------------|
    | NONE           | nothing: data as they were        | none          |                        |
    | TENSOR_DELAYED | the array                         | float32, ()   | largest of steps before |
    | TENSOR_CURRENT | the array                         | float32, ()   | largest of the array   |
    | BLOCK_128      | 1 x 128 or 128 x 128 elements     | float32       | largest of the block   |
    | MXFP8          | 32 elements along one dim         | powers of two | largest of the block   |
    """

    NONE = "none"
    TENSOR_DELAYED = "tensor_delayed"
    TENSOR_CURRENT = "tensor_current"
    BLOCK_128 = "block_128"
    MXFP8 = "mxfp8"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale_inv", "amax"),
    meta_fields=("mode", "dtype", "block"),
)
@dataclass(frozen=True)
class ScaledArray:
    """A quantised array with its scales: value = data * scale_inv, each scale over its block.

    A pytree: it passes through `jit`, `scan`, `checkpoint`, `tree.map` and `device_put`, and each
    of its arrays has a sharding of its own. Under a transformation that adds leading dims all of
    them have these, and a scale covers one entry along each.

    Attributes:
      data: float8_e4m3fn | float8_e5m2; of dtype `dtype` where the mode is NONE.
      scale_inv: float32 of rank 0 for a scale of the array; float32 for BLOCK_128 and
        float8_e8m0fnu for MXFP8, one a block, a partial block at the end of a dim included; None
        for NONE.
      amax: the largest magnitude, float32 of rank 0, NaN or infinity where an element is so; None
        for scales of blocks and for NONE.
      mode: where the scales come from and what they cover.
      dtype: of the array that this one stands for.
      block: how many elements a scale covers, one number a dim; None: all.
    """

    data: jax.Array
    scale_inv: jax.Array | None
    amax: jax.Array | None
    mode: ScalingMode
    dtype: np.dtype[Any]
    block: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # Statics that are equal have to compare so: jnp.bfloat16 and its dtype, lists and tuples.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.block is not None:
            object.__setattr__(self, "block", tuple(self.block))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that this one stands for."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Of the array that this one stands for."""
        return self.data.ndim

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """Multiply by the scales, in float32.

        Args:
          dtype: of the result; None: the dtype that this array stands for.
        Returns: an array of shape `shape`.
        """
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if self.scale_inv is None:
            return self.data.astype(dtype)
        wide = self.data.astype(jnp.float32)
        for factor in _factors(self.scale_inv):
            wide = wide * _spread(factor, self.data, self.block)
        return wide.astype(dtype)


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
    exponent is at least -127. Infinities saturate, NaN stays.

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
        amax = jnp.max(jnp.abs(wide), initial=0.0)
        if scale_inv is None:
            scale_inv = tensor_scale_inv(_largest_finite(wide), name)
        scale_inv = jnp.asarray(scale_inv, jnp.float32)
        data = _saturated(wide * (1 / scale_inv), name)
        return ScaledArray(data, scale_inv, amax, mode, x.dtype)
    split, spec = _split(wide, block), array_type.explicit_spec(x)
    within = tuple(range(1, split.ndim, 2))
    largest = _largest_finite(split, within)
    if mode is ScalingMode.MXFP8:
        exponent = _exponent(largest) - _exponent_of_fmax(name)
        exponent = jnp.maximum(exponent, -127)
        scale_inv = jax.lax.bitcast_convert_type(
            (exponent + 127).astype(jnp.uint8), jnp.float8_e8m0fnu
        )
        scaled = split * jnp.expand_dims(_power_of_two(-exponent), within)
    else:
        scale_inv = tensor_scale_inv(largest, name)
        scaled = split * jnp.expand_dims(1 / scale_inv, within)
    data = _joined(_saturated(scaled, name), x.shape)
    data = data if spec is None else array_type.laid_out(data, spec)
    return ScaledArray(data, scale_inv, None, mode, x.dtype, tuple(block))


def tensor_scale_inv(amax: jax.Array, dtype: Any = jnp.float8_e4m3fn) -> jax.Array:
    """The float32 scale that puts `amax`, finite and >= 0, at the largest value of `dtype`.

    Of 0 (and of what devices flush to 0) it is 1; it is never subnormal.
    """
    # A product, as XLA makes one of such a division here and there: the same bits everywhere.
    unit = np.float32(1) / np.float32(jnp.finfo(jnp.dtype(dtype)).max)
    return jnp.where(amax < _TINY, 1.0, jnp.maximum(amax * unit, _TINY)).astype(jnp.float32)


def _largest_finite(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0), axes, initial=0.0)


def _saturated(x: jax.Array, dtype: str) -> jax.Array:
    fmax = float(jnp.finfo(jnp.dtype(dtype)).max)  # beyond it a cast gives NaN or infinity
    return jnp.clip(x, -fmax, fmax).astype(jnp.dtype(dtype))


# ---- powers of two -------------------------------------------------------------------------------
#
# Taken from and put into the bits of a float32: exact on every device, which log2 and exp2 are not.


def _exponent(x: jax.Array) -> jax.Array:
    """floor(log2(x)) of x >= 0; -127 of 0 and of subnormal numbers."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent in float32, -126 <= exponent <= 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _exponent_of_fmax(dtype: str) -> int:
    return int(np.log2(float(jnp.finfo(jnp.dtype(dtype)).max)))


def _factors(scale_inv: jax.Array) -> list[jax.Array]:
    """float32 factors of the scales. 2^-127 is subnormal there, and devices may flush it to 0."""
    if scale_inv.dtype != jnp.float8_e8m0fnu:
        return [scale_inv]
    code = jax.lax.bitcast_convert_type(scale_inv, jnp.uint8).astype(jnp.int32)
    half = (code - 127) >> 1
    factors = [_power_of_two(half), _power_of_two(code - 127 - half)]
    return [jnp.where(code == 255, jnp.nan, f) for f in factors]  # 255 is the format's NaN


# ---- blocks --------------------------------------------------------------------------------------
#
# On Explicit axes a dim keeps those that leave its blocks whole, and is gathered from the others.


def _split(x: jax.Array, block: Sequence[int]) -> jax.Array:
    """[n, …] -> [blocks, block, …], the last block of a dim filled up with zeros."""
    counts = scale_shape(x.shape, block)
    spec = array_type.explicit_spec(x)
    if spec is not None:
        spec = scale_spec(x.shape, spec, block, array_type.mesh_of(x).shape)
        x = array_type.laid_out(x, spec)
        spec = tuple(axes for dim in spec for axes in (dim, ()))
    missing = [c * b - n for n, c, b in zip(x.shape, counts, block, strict=True)]
    if any(missing):
        x = jnp.pad(x, [(0, m) for m in missing])
    return _reshaped(x, [n for pair in zip(counts, block, strict=True) for n in pair], spec)


def _joined(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[blocks, block, …] -> [n, …]."""
    spec = array_type.explicit_spec(x)
    sizes = [c * b for c, b in zip(x.shape[::2], x.shape[1::2], strict=True)]
    x = _reshaped(x, sizes, None if spec is None else spec[::2])
    return x if x.shape == shape else x[tuple(slice(n) for n in shape)]


def _reshaped(x: jax.Array, sizes: Sequence[int], spec: Spec | None) -> jax.Array:
    if spec is None:
        return x.reshape(sizes)
    sharding = NamedSharding(array_type.mesh_of(x), to_partition_spec(spec))
    return jax.lax.reshape(x, sizes, out_sharding=sharding)


def _spread(scale: jax.Array, data: jax.Array, block: tuple[int, ...] | None) -> jax.Array:
    """Scales, one a block, as one an element of `data`; of size 1 where one serves them all."""
    if block is None:
        return jnp.expand_dims(scale, tuple(range(scale.ndim, data.ndim)))
    block = (1,) * (data.ndim - len(block)) + block
    blocks = jnp.expand_dims(scale, tuple(range(1, 2 * data.ndim, 2)))
    sizes = [n for pair in zip(scale.shape, block, strict=True) for n in pair]
    out = _joined(jnp.broadcast_to(blocks, sizes), data.shape)
    spec = array_type.explicit_spec(data)
    return out if spec is None else array_type.laid_out(out, spec)


# ---- checks --------------------------------------------------------------------------------------


def _checked(x: jax.Array, mode: Any, block: Any, dtype: Any, scale_inv: Any) -> str:
    """The name of the format."""
    op = "quantize"
    if not isinstance(mode, ScalingMode):
        want = " | ".join(str(m) for m in ScalingMode)
        raise ValueError(wrong(op, "mode", repr(mode), want, "Choose one of these."))
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
        raise ValueError(wrong(op, "block", repr(block), want, fix))
