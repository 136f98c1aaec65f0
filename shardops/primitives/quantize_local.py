"""Quantisation on one device: the jnp reference, which says what it means, and the kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shardops.primitives.local import Results, local_primitive
from shardops.primitives.scaled import quantize_reference
from shardops.primitives.scaling import ScalingMode, largest, largest_finite
from shardops.rules.quantize import Blocks

if TYPE_CHECKING:
    from shardops.kernels.quantize_plan import QuantizeProblem, Scales


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
    """Quantise in jnp: what the kernels compute, and what a CPU runs.

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


def problem_of(form: Form, shape: tuple[int, ...], dtype: str) -> "QuantizeProblem":
    """What kernels are told of an array [*added, *rows, h] and its form."""
    from shardops.kernels import quantize_plan as plans  # CUDA only

    blocks, added = form.blocks, form.blocks.added
    scales: Scales = "tensor"
    if form.mode is ScalingMode.MXFP8:
        scales = "row32"
    elif blocks.block is not None:
        scales = "square" if blocks.block[0] > 1 else "row128"
    *outer, rows, cols = (1, 1, *shape[added:])
    return plans.QuantizeProblem(
        prod(shape[:added]),
        prod(outer),
        rows,
        cols,
        dtype,
        form.format,
        scales,
        blocks.rows,
        blocks.columns,
        form.amax,
        again=form.mode is ScalingMode.TENSOR_CURRENT,
    )


def quantize_kernel(x: jax.Array, *scale_inv: jax.Array, form: Form) -> Results:
    from shardops.kernels import quantize as kernels

    results = jax.eval_shape(partial(quantized, form=form), x, *scale_inv)
    given = scale_inv[0] if form.given else None
    return kernels.quantize(x, given, problem_of(form, x.shape, x.dtype.name), results)


def _magnitudes_kernel(x: jax.Array, *, added: int) -> Results:
    from shardops.kernels import quantize as kernels

    return (kernels.magnitudes(x, added),)


local_quantize = local_primitive("shardops_quantize", quantized, quantize_kernel)
local_magnitudes = local_primitive("shardops_quantize_magnitudes", magnitudes, _magnitudes_kernel)
