"""Operands of an 8-bit product in both layouts, and what a dense layer multiplies."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardops import array_type, config, routing
from shardops.checkpoint_policies import NORM
from shardops.errors import wrong
from shardops.layers.canonical import Canonical
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


class Quantized(NamedTuple):
    """An operand in canonical form, what its cotangent goes to, and what was normalised."""

    parts: Both
    straight: jax.Array
    residual: jax.Array | None


@dataclass(frozen=True)
class Input:
    """What a layer multiplies: an array as it is."""

    x: jax.Array

    def plain(self) -> tuple[jax.Array, jax.Array | None]:
        """In the dtype of x, and what was normalised."""
        return self.x, None

    def quantized(self, form: Canonical, quantizer: Quantizer) -> Quantized:
        """In both layouts."""
        x = form.x(self.x)
        return Quantized(in_both_layouts(x, quantizer), x, None)


@dataclass(frozen=True)
class Normed(Input):
    """What a layer multiplies: the norm over the last dim of an array, or of a sum, h = x + add."""

    norm: str
    gamma: jax.Array
    beta: jax.Array | None
    options: dict[str, Any]
    add: jax.Array | None = None
    return_input: bool = False

    def _of(self, x: jax.Array, add: jax.Array | None, **more: Any) -> tuple[Any, Any]:
        """The norm and, where it is asked for, h."""
        options = {**self.options, **more, "add": add, "return_input": self.return_input}
        if self.norm == "layer_norm":
            out = layer_norm(x, self.gamma, self.beta, **options)
        else:
            out = rms_norm(x, self.gamma, **options)
        return out if self.return_input else (out, None)

    def plain(self) -> tuple[jax.Array, jax.Array | None]:
        y, h = self._of(self.x, self.add)
        return named(y, NORM), h

    def quantized(self, form: Canonical, quantizer: Quantizer) -> Quantized:
        """By the launch that normalises: the last dim is the last one in canonical form too."""
        quantizer = replace(quantizer, layout="both", amax_history=None, observed=None)
        add = None if self.add is None else form.x(self.add)
        scaled, h = self._of(form.x(self.x), add, quantizer=quantizer)
        rows, columns, amax = both_of(scaled)
        parts = Both(named_data(rows, NORM), named_data(columns, NORM), amax)
        if h is not None:
            h = form.with_rows(h)
            spec = array_type.explicit_spec(self.x)
            h = h if spec is None else array_type.laid_out(h, spec)
        return Quantized(parts, scaled.straight, h)


def normed(
    op: str,
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    norm: str,
    options: dict[str, Any],
    add: jax.Array | None = None,
    return_input: bool = False,
) -> Normed:
    """A checked norm, for a layer."""
    check.one_of(op, "norm", norm, ("layer_norm", "rms_norm"))
    if norm == "rms_norm" and beta is not None:
        want, fix = "None with norm='rms_norm'", "Take norm='layer_norm', or leave beta out."
        raise ValueError(wrong(op, "beta", "given", want, fix))
    if add is not None:
        check.shape(op, "add", add, x.shape)
    check.flag(op, "return_input", return_input)
    return Normed(x, norm, gamma, beta, options, add, return_input)
