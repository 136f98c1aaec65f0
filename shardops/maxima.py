"""Cotangents that are combined by maximum, where JAX would add them.

So the largest magnitudes that a backward pass sees leave it. A value of dtype `MAX32` is a float32
number >= 0, or NaN; the sum of two in JAX's derivatives is the larger one, NaN counting as the
largest. Arrays of it are made inside of `jax.jit` alone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Private: dtypes of one's own have no public name in JAX. What is used of them here is what
# Flax's FP8 ops use too, and tests/layers/test_watch.py runs on each version that is supported.
from jax._src import core, dtypes, earray
from jax._src.interpreters import pxla
from jax.custom_batching import custom_vmap

_FLOAT = np.dtype(np.float32)


class _Rules:
    """What JAX asks of a dtype of one's own."""

    @staticmethod
    def physical_element_aval(dtype: Any) -> Any:
        del dtype
        return core.ShapedArray((), _FLOAT)

    @staticmethod
    def convert_from(dtype: Any, other: Any) -> bool:
        del dtype
        return other == _FLOAT

    @staticmethod
    def convert_to(other: Any, dtype: Any) -> bool:
        del dtype
        return other == _FLOAT

    @staticmethod
    def add(dtype: Any, x: Any, y: Any) -> Any:
        del dtype
        return as_maximum(larger(as_number(x), as_number(y)))

    @staticmethod
    def zero(dtype: Any) -> Any:
        return jax.lax.convert_element_type(np.float32(0), dtype)

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        return dtype

    @staticmethod
    def global_sharded_result_handler(aval: Any, sharding: Any, committed: Any) -> Any:
        # Residuals of `jax.grad(jax.jit(f))` leave one program and enter the next.
        make = pxla.global_result_handlers[core.ShapedArray]
        physical = make(core.physical_aval(aval), sharding, committed)
        return physical.wrap(lambda array: earray.EArray(aval, array))

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any) -> Any:
        plain = jax.lax.full(shape, jax.lax.convert_element_type(value, _FLOAT), _FLOAT)
        return jax.lax.convert_element_type(plain, dtype)


class _Kind(dtypes.extended):
    """What `jax.dtypes.issubdtype` knows the dtype by."""


@dataclass(frozen=True)
class _Max32(dtypes.ExtendedDType):
    _rules: Any = _Rules
    type: Any = _Kind
    itemsize: int = 4

    @property
    def name(self) -> str:
        return "max32"

    def __repr__(self) -> str:
        return self.name


MAX32 = _Max32()


def as_maximum(x: jax.Array) -> jax.Array:
    """float32 numbers as MAX32."""
    return jax.lax.convert_element_type(x, MAX32)


def as_number(x: jax.Array) -> jax.Array:
    """MAX32 as float32 numbers."""
    return jax.lax.convert_element_type(x, _FLOAT)


def larger(x: jax.Array, y: jax.Array) -> jax.Array:
    """The larger of numbers >= 0; NaN where one is.

    By their bits: a maximum of floats loses NaN on some devices.
    """
    bits = (jax.lax.bitcast_convert_type(a, jnp.int32) for a in (x, y))
    return jax.lax.bitcast_convert_type(jnp.maximum(*bits), _FLOAT)


def is_traced() -> bool:
    """Whether what is computed here is part of a program that is compiled as a whole."""
    return isinstance(jnp.zeros((), jnp.int32), core.Tracer)


@custom_vmap
def reported(amax: jax.Array, like: jax.Array) -> jax.Array:
    """An amax as the cotangent of `like`.

    Under `vmap` that of all entries, where they share `like`: JAX would add what each has.
    Inside a `shard_map` that of all devices that share `like`.
    """
    return as_maximum(_over_devices(amax, like))


def _over_devices(amax: jax.Array, like: jax.Array) -> jax.Array:
    over = _varying(amax) - _varying(like)
    if not over:
        return amax
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, tuple(sorted(over))), _FLOAT)


def _varying(array: jax.Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


@reported.def_vmap
def _(size: int, batched: Any, amax: jax.Array, like: jax.Array) -> Any:
    by_amax, by_like = batched
    if by_like:
        every = amax if by_amax else jnp.broadcast_to(amax, (size, *amax.shape))
        return reported(every, like), True
    if by_amax:
        amax = jnp.max(jax.lax.bitcast_convert_type(amax, jnp.int32), 0)
        amax = jax.lax.bitcast_convert_type(amax, _FLOAT)
    return reported(amax, like), False
