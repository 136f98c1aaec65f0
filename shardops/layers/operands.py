"""Operands of an 8-bit product in both layouts, and what a dense layer multiplies."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardops import config, routing
from shardops.checkpoint_policies import NORM
from shardops.errors import wrong
from shardops.layers.names import named, named_data
from shardops.primitives import check
from shardops.primitives.norm import layer_norm, rms_norm
from shardops.primitives.quantize import QUANTIZED, quantize
from shardops.primitives.quantize_op import MagnitudesOp
from shardops.primitives.scaled import ScaledArray
from shardops.primitives.scaling import ScalingMode, largest, tensor_scale_inv
from shardops.quantizer import Quantizer


class Both(NamedTuple):
    """An array [*groups, *rows, h] in 8 bits, and as [*groups, h, *rows]; its largest magnitude."""

    rows: ScaledArray
    columns: ScaledArray
    amax: jax.Array | None


def in_both_layouts(x: jax.Array, quantizer: Quantizer, groups: int = 0) -> Both:
    """Quantise without a derivative. One scale, where it is one, serves all groups."""
    x = jax.lax.stop_gradient(x)
    quantizer = replace(quantizer, layout="both", amax_history=None, observed=None)
    if not groups:
        return both_of(quantize(x, quantizer))
    mode, amax = quantizer.mode, None
    if mode is ScalingMode.TENSOR_CURRENT:
        (both,) = routing.run(MagnitudesOp(config.runs_as_kernel("quantize")), (x,), ())
        amax, scale_inv = both[0], tensor_scale_inv(both[1], quantizer.format)
        quantizer = replace(quantizer, mode=ScalingMode.TENSOR_DELAYED, scale_inv=scale_inv)

    def each(x: jax.Array) -> ScaledArray:
        return quantize(x, quantizer).detach()

    for _ in range(groups):
        each = jax.vmap(each)
    scaled = each(x)
    if quantizer.block is None:
        amax = largest(jnp.asarray(scaled.amax)) if amax is None else amax
        return both_of(replace(scaled, scale_inv=quantizer.scale_inv, mode=mode, amax=amax))
    parts = both_of(scaled)
    rows, columns = (
        replace(part, block=((1,) * groups + (part.block or ()))) for part in parts[:2]
    )
    return Both(rows, columns, None)


def both_of(scaled: ScaledArray) -> Both:
    """The two parts of a quantised array, as constants."""
    amax, scaled = scaled.amax, replace(scaled.detach(), amax=None)
    if scaled.block is None and scaled.mode is ScalingMode.TENSOR_CURRENT:
        # Found in a pass over x: a policy that saves the data saves it too.
        scaled = replace(scaled, scale_inv=named(jnp.asarray(scaled.scale_inv), QUANTIZED))
    columns = scaled.transposed
    assert columns is not None
    rows = replace(scaled, transposed_data=None, transposed_scale_inv=None)
    # Named again: a name within what has a derivative shows where one is taken of it alone.
    return Both(named_data(rows, QUANTIZED), named_data(columns, QUANTIZED), amax)


@dataclass(frozen=True)
class Input:
    """What a layer multiplies: an array as it is."""

    x: jax.Array

    def plain(self) -> jax.Array:
        """In the dtype of x."""
        return self.x

    def quantized(self, reorder: Any, quantizer: Quantizer) -> tuple[Both, jax.Array]:
        """Both layouts of `reorder(x)`, and the array that its cotangent goes to."""
        x = reorder(self.x)
        return in_both_layouts(x, quantizer), x


@dataclass(frozen=True)
class Normed(Input):
    """What a layer multiplies: the norm of an array over its last dim."""

    norm: str
    gamma: jax.Array
    beta: jax.Array | None
    options: dict[str, Any]

    def _of(self, x: jax.Array, **more: Any) -> Any:
        if self.norm == "layer_norm":
            return layer_norm(x, self.gamma, self.beta, **self.options, **more)
        return rms_norm(x, self.gamma, **self.options, **more)

    def plain(self) -> jax.Array:
        return named(self._of(self.x), NORM)

    def quantized(self, reorder: Any, quantizer: Quantizer) -> tuple[Both, jax.Array]:
        """Quantised by the launch that normalises, where `reorder` leaves the last dim in place."""
        quantizer = replace(quantizer, layout="both", amax_history=None, observed=None)
        scaled = self._of(reorder(self.x), quantizer=quantizer)
        rows, columns, amax = both_of(scaled)
        return Both(named_data(rows, NORM), named_data(columns, NORM), amax), scaled.straight


def normed(
    op: str,
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    norm: str,
    options: dict[str, Any],
) -> Normed:
    """A checked norm, for a layer."""
    check.one_of(op, "norm", norm, ("layer_norm", "rms_norm"))
    if norm == "rms_norm" and beta is not None:
        want, fix = "None with norm='rms_norm'", "Take norm='layer_norm', or leave beta out."
        raise ValueError(wrong(op, "beta", "given", want, fix))
    return Normed(x, norm, gamma, beta, options)
