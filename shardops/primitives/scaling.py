"""Numbers of quantisation in plain jnp: scales of magnitudes, rounding to a format, blocks."""

import enum
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardops import array_type
from shardops.rules.scales import scale_shape, scale_spec
from shardops.rules.spec import Spec, to_partition_spec

FLOATS = ("float32", "bfloat16", "float16")
FORMATS = ("float8_e4m3fn", "float8_e5m2")
TINY = float(np.finfo(np.float32).tiny)  # smaller ones are flushed to 0 on some devices


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


def tensor_scale_inv(amax: jax.Array, dtype: Any = jnp.float8_e4m3fn) -> jax.Array:
    """The float32 scale that puts `amax`, finite and >= 0, at the largest value of `dtype`.

    Of 0 (and of what devices flush to 0) it is 1; it is never subnormal.
    """
    # A product, as XLA makes one of such a division here and there: the same bits everywhere.
    unit = np.float32(1) / np.float32(jnp.finfo(jnp.dtype(dtype)).max)
    return jnp.where(amax < TINY, 1.0, jnp.maximum(amax * unit, TINY)).astype(jnp.float32)


def largest(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude of float32 numbers; NaN where one is.

    By their bits, whose order is that of magnitudes, NaN on top: a maximum of floats loses NaN on
    some devices.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return magnitude_of(jnp.max(bits, axes, initial=0))


def magnitude_of(bits: jax.Array) -> jax.Array:
    """The float32 number >= 0 with these bits; the one NaN for those of any NaN."""
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isnan(value), jnp.nan, value)


def largest_finite(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude of the finite elements; 0 where there is none."""
    return largest(jnp.where(jnp.isfinite(x), x, 0.0), axes)


def saturated(x: jax.Array, dtype: str) -> jax.Array:
    """float32 numbers in a format: what it cannot hold becomes its largest; NaN stays."""
    fmax = float(jnp.finfo(jnp.dtype(dtype)).max)  # beyond it a cast gives NaN or infinity
    return jnp.clip(x, -fmax, fmax).astype(jnp.dtype(dtype))


def moved(array: Any, source: int, to: int) -> Any:
    """`jnp.moveaxis`, of a ShapeDtypeStruct too."""
    move = partial(jnp.moveaxis, source=source, destination=to)
    return jax.eval_shape(move, array) if isinstance(array, jax.ShapeDtypeStruct) else move(array)


# ---- powers of two -------------------------------------------------------------------------------
#
# Taken from and put into the bits of a float32: exact on every device, which log2 and exp2 are not.


def exponent_of(x: jax.Array) -> jax.Array:
    """floor(log2(x)) of x >= 0; -127 of 0 and of subnormal numbers."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent in float32, -126 <= exponent <= 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def exponent_of_fmax(dtype: str) -> int:
    """floor(log2(fmax)), fmax the largest value of a format."""
    return int(np.log2(float(jnp.finfo(jnp.dtype(dtype)).max)))


def factors(scale_inv: jax.Array) -> list[jax.Array]:
    """float32 factors of the scales. 2^-127 is subnormal there, and devices may flush it to 0."""
    if scale_inv.dtype != jnp.float8_e8m0fnu:
        return [scale_inv]
    code = jax.lax.bitcast_convert_type(scale_inv, jnp.uint8).astype(jnp.int32)
    half = (code - 127) >> 1
    factors = [power_of_two(half), power_of_two(code - 127 - half)]
    return [jnp.where(code == 255, jnp.nan, f) for f in factors]  # 255 is the format's NaN


# ---- blocks --------------------------------------------------------------------------------------
#
# On Explicit axes a dim keeps those that leave its blocks whole, and is gathered from the others.


def split(x: jax.Array, block: Sequence[int]) -> jax.Array:
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


def joined(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
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


def spread(scale: jax.Array, data: jax.Array, block: tuple[int, ...] | None) -> jax.Array:
    """Scales, one a block, as one an element of `data`; of size 1 where one serves them all."""
    if block is None:
        return jnp.expand_dims(scale, tuple(range(scale.ndim, data.ndim)))
    block = (1,) * (data.ndim - len(block)) + block
    blocks = jnp.expand_dims(scale, tuple(range(1, 2 * data.ndim, 2)))
    sizes = [n for pair in zip(scale.shape, block, strict=True) for n in pair]
    out = joined(jnp.broadcast_to(blocks, sizes), data.shape)
    spec = array_type.explicit_spec(data)
    return out if spec is None else array_type.laid_out(out, spec)
