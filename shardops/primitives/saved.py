"""8-bit arrays as their bits, where JAX would take them for floats like others.

What `jax.checkpoint` saves of floats it rounds to their format's exponent and mantissa, as IEEE 754
counts these: of float8_e4m3fn, numbers above 240 become NaN and subnormal ones 0.

Of a result of a function with a derivative of its own JAX makes a cotangent of zeros where it has
none. A power of two, float8_e8m0fnu, is never zero: what it makes is NaN, which `jax_debug_nans`
finds.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=("bits",), meta_fields=("dtype",))
@dataclass(frozen=True)
class _Bits:
    bits: jax.Array
    dtype: Any


def packed(tree: Any, *, powers_of_two_alone: bool = False) -> Any:
    """`tree`, of each 8-bit float the bits."""

    def pack(array: jax.Array) -> Any:
        if array.dtype.itemsize > 1 or not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        if powers_of_two_alone and array.dtype != jnp.float8_e8m0fnu:
            return array
        return _Bits(jax.lax.bitcast_convert_type(array, jnp.uint8), array.dtype)

    return jax.tree.map(pack, tree)


def unpacked(tree: Any) -> Any:
    """The tree that was `packed`."""

    def unpack(part: Any) -> Any:
        if not isinstance(part, _Bits):
            return part
        return jax.lax.bitcast_convert_type(part.bits, part.dtype)

    return jax.tree.map(unpack, tree, is_leaf=lambda part: isinstance(part, _Bits))
