"""Quantisation on one device: the jnp reference. There is no kernel yet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardops.primitives.local import Results, local_primitive
from shardops.primitives.scaled import quantize_reference
from shardops.primitives.scaling import ScalingMode, largest, largest_finite
from shardops.rules.quantize import Blocks


@dataclass(frozen=True)
class Form:
    """What is static of a quantised array."""

    format: str
    mode: ScalingMode
    blocks: Blocks

    @property
    def given(self) -> bool:
        """Whether one scale an added entry is an operand: where it serves the whole array."""
        return self.blocks.block is None

    @property
    def amax(self) -> bool:
        """Whether the largest magnitude is a result: of current scaling it was found before."""
        return self.mode is ScalingMode.TENSOR_DELAYED

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results."""
        rows, columns, scales = self.blocks.rows, self.blocks.columns, not self.given
        return (
            *("data",) * rows,
            *("scales",) * (rows and scales),
            *("transposed data",) * columns,
            *("transposed scales",) * (columns and scales),
            *("amax",) * self.amax,
        )


def quantized(x: jax.Array, *scale_inv: jax.Array, form: Form) -> Results:
    """Quantise in jnp: what a kernel is to compute, and what runs until there is one.

    Args:
      x: [*added, *rows, h].
      scale_inv: [*added], with `form.given`.
    Returns: those of `form.results`. data as x; scales one a block; transposed data
      [*added, h, *rows], their scales; amax [*added] float32, NaN or infinity where x has it.
    """
    blocks, added = form.blocks, form.blocks.added
    x = as_stored(x)
    if form.given:

        def one(x: jax.Array, scale_inv: jax.Array) -> tuple[Any, Any]:
            mode = ScalingMode.TENSOR_DELAYED
            out = quantize_reference(x, mode, None, form.format, scale_inv=scale_inv)
            return out.data, out.amax

        every: Callable[..., tuple[Any, Any]] = one
        for _ in range(added):
            every = jax.vmap(every)
        data, amax = every(x, *scale_inv)
        columns = (jnp.moveaxis(data, -1, added),) if blocks.columns else ()
        return (*(data,) * blocks.rows, *columns, *(amax,) * form.amax)
    parts = [(x, blocks.of_rows(x.ndim))] if blocks.rows else []
    if blocks.columns:
        parts.append((jnp.moveaxis(x, -1, added), blocks.of_columns(x.ndim)))
    results: list[Any] = []
    for array, block in parts:
        part = quantize_reference(array, form.mode, block, form.format)
        results += [part.data, part.scale_inv]
    return tuple(results)


def as_stored(x: jax.Array) -> jax.Array:
    """x, computed once: else XLA computes it anew for scales and for data, a last bit apart."""
    return jax.lax.optimization_barrier(x)


def magnitudes(x: jax.Array, *, added: int) -> Results:
    """[*added, 2] float32: the largest magnitude, and that of the finite elements.

    NaN and infinity are the first where an element is so.
    """
    wide = as_stored(x).astype(jnp.float32)
    axes = tuple(range(added, x.ndim))
    return (jnp.stack([largest(wide, axes), largest_finite(wide, axes)], -1),)


# The second function is what CUDA runs: a kernel goes there.
local_quantize = local_primitive("shardops_quantize", quantized, quantized)
local_magnitudes = local_primitive("shardops_quantize_magnitudes", magnitudes, magnitudes)
