"""The quantiser of one tensor: format, scaling mode, layout, and the state of delayed scaling."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardops.errors import wrong
from shardops.primitives.scaling import TINY, ScalingMode, tensor_scale_inv
from shardops.rules.quantize import Layout

ROLES = ("input", "kernel", "gradient")  # of the quantisers of a dense layer
AmaxCompute = Literal["max", "most_recent"]

_LARGEST = 2.0**126  # of a scale: the inverse of a larger one is subnormal


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("scale_inv", "amax_history", "observed"),
    meta_fields=("mode", "format", "layout", "block", "margin", "amax_compute"),
)
@dataclass(frozen=True, eq=False)
class Quantizer:
    """How one tensor is quantised: made by a recipe of `so.recipes`, used by `so.quantize`.

    A pytree: the state of delayed scaling passes through `jit`, `scan`, `grad` and checkpoints as
    its arrays, and is replaced once a step by what `update` returns. The other modes have none.

    Attributes:
      mode: where scales come from and what they cover.
      format: "float8_e4m3fn" | "float8_e5m2".
      layout: what is written: "rows" | "columns" | "both".
      block: elements of the last two dims that a scale covers; None: the whole tensor.
      margin: of delayed scaling: scales are 2^margin times what the history asks for.
      amax_compute: of delayed scaling: "max" of the history, or its "most_recent" entry.
      scale_inv: of delayed scaling: the scale of this step, float32 of rank 0.
      amax_history: of delayed scaling: the largest magnitudes of steps before, newest first.
      observed: of delayed scaling, in a function that is differentiated: where a layer leaves what
        it saw, as made by `so.recipes.watch`. None in state that is kept.
    """

    mode: ScalingMode
    format: str
    layout: Layout = "rows"
    block: tuple[int, int] | None = None
    margin: int = 0
    amax_compute: AmaxCompute = "max"
    scale_inv: jax.Array | None = None
    amax_history: jax.Array | None = None
    observed: jax.Array | None = None

    def __eq__(self, other: object) -> bool:
        """Whether both have the same statics and the same numbers as their state."""
        if not isinstance(other, Quantizer):
            return NotImplemented
        (one, statics), (two, others) = jax.tree.flatten(self), jax.tree.flatten(other)
        return statics == others and all(map(_same, one, two))

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))

    @property
    def scale(self) -> jax.Array | None:
        """1 / scale_inv: what values are multiplied by. None where the mode has no state."""
        return None if self.scale_inv is None else 1 / self.scale_inv

    def update(self, amax: jax.Array | None) -> "Quantizer":
        """The quantiser of the next step.

            history = [amax, *history[:-1]]
            scale_inv = max(history) * 2^margin / fmax,  or history[0] * 2^margin / fmax

        An `amax` that is infinite or NaN leaves all as it was: that step tells nothing. Where the
        history asks for a scale of 0 the last one stays. No derivative.

        Args:
          amax: `amax` of the ScaledArray, float32 of rank 0. Of several microbatches in one step:
            their maximum (`jnp.maximum`), once. Not looked at by modes without state.
        Returns: a Quantizer with the same statics, shapes and dtypes.
        Raises: TypeError where delayed scaling gets None, ValueError for another shape.
        """
        if self.amax_history is None or self.scale_inv is None:
            return self
        if amax is None:
            fix = "Pass `scaled.amax` of what it quantised."
            raise TypeError(wrong("update", "amax", "None", "an array", fix))
        if not _is_real(amax):
            fix = "Pass `scaled.amax` of what it quantised."
            raise TypeError(wrong("update", "amax", f"a {type(amax).__name__}", "a number", fix))
        if jnp.shape(amax) != ():
            fix = "Take its maximum first: one scale serves the tensor."
            got = f"of shape {jnp.shape(amax)}"
            raise ValueError(wrong("update", "amax", got, "()", fix))
        newest = jax.lax.stop_gradient(jnp.asarray(amax, jnp.float32))
        known = jnp.isfinite(newest)
        rolled = jnp.roll(self.amax_history, 1).at[0].set(newest)
        history = jnp.where(known, rolled, self.amax_history)
        asked = jnp.max(history) if self.amax_compute == "max" else history[0]
        scale_inv = tensor_scale_inv(asked, self.format) * jnp.float32(2.0**self.margin)
        scale_inv = jnp.where(
            known & (asked >= TINY), jnp.clip(scale_inv, TINY, _LARGEST), self.scale_inv
        )
        return replace(self, scale_inv=scale_inv, amax_history=history, observed=None)


def _is_real(value: Any) -> bool:
    """Whether it is an array of real numbers, or one number."""
    known = isinstance(value, jax.Array | np.ndarray | np.generic | float | int)
    kinds = (jnp.floating, jnp.integer)
    return known and any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds)


def _same(one: Any, other: Any) -> bool:
    """Numbers, or their types where a quantiser has these in their place."""
    if isinstance(one, jax.Array | np.ndarray) and isinstance(other, jax.Array | np.ndarray):
        return one is other or bool(jnp.array_equal(one, other, equal_nan=True))
    return one is other or bool(one == other)


def delayed(
    format: str, layout: Layout, *, history: int, margin: int, algorithm: AmaxCompute
) -> Quantizer:
    """A quantiser of delayed scaling before its first step: its scale is 1, times the margin."""
    return Quantizer(
        ScalingMode.TENSOR_DELAYED,
        format,
        layout,
        margin=margin,
        amax_compute=algorithm,
        scale_inv=jnp.full((), 2.0**margin, jnp.float32),
        amax_history=jnp.zeros((history,), jnp.float32),
    )


def stateless(mode: ScalingMode, format: str, layout: Layout, block: Any = None) -> Quantizer:
    """A quantiser whose scales come from what it quantises."""
    return Quantizer(mode, format, layout, block)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("input", "kernel", "gradient"),
    meta_fields=(),
)
@dataclass(frozen=True)
class DenseQuantizers:
    """The quantisers of a dense layer: made by `dense_quantizers` of a recipe.

    A pytree. With delayed scaling it is state: see `so.recipes.watch` and `so.recipes.update`.

    Attributes:
      input: of the layer's input.
      kernel: of its kernel.
      gradient: of the cotangent of its product.
    """

    input: Quantizer
    kernel: Quantizer
    gradient: Quantizer
