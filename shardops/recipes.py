"""Recipes of quantisation: each makes the quantisers of a product's operands.

    recipe = so.recipes.DelayedScaling()
    q = recipe.quantizer(role="input")
    scaled = so.quantize(x, q)
    q = q.update(scaled.amax)  # once a step

and those of a dense layer, whose backward pass quantises too:

    qs = recipe.dense_quantizers()
    y = so.dense(x, kernel, quantizers=qs)

A role says which operand: "input" (activations), "kernel" (weights) or "gradient" (cotangents).
Where nothing else is asked for, inputs and kernels are E4M3, and gradients E5M2, which has more
range and less precision.
"""

from dataclasses import dataclass
from typing import Any, Literal

from shardops.errors import wrong
from shardops.primitives import check
from shardops.primitives.scaling import FORMATS, ScalingMode
from shardops.quantizer import AmaxAlgorithm, DenseQuantizers, Quantizer, delayed, stateless
from shardops.rules.quantize import Layout
from shardops.watching import update, watch

__all__ = [
    "Block128Scaling",
    "CurrentScaling",
    "DelayedScaling",
    "MXFP8Scaling",
    "update",
    "watch",
]

Role = Literal["input", "kernel", "gradient"]


@dataclass(frozen=True)
class _Formats:
    format: str = "float8_e4m3fn"
    gradient_format: str = "float8_e5m2"

    def __post_init__(self) -> None:
        for name in ("format", "gradient_format"):
            check.one_of(type(self).__name__, name, getattr(self, name), FORMATS)

    def _checked(self, role: Any, layout: Any) -> str:
        """The format of a role."""
        op = type(self).__name__
        check.one_of(op, "role", role, ("input", "kernel", "gradient"))
        check.one_of(op, "layout", layout, ("rows", "columns", "both"))
        return self.gradient_format if role == "gradient" else self.format

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """The quantiser of one operand."""
        raise NotImplementedError

    def dense_quantizers(self) -> DenseQuantizers:
        """The quantisers of a dense layer; `so.layer_norm_mlp` takes a pair of these."""
        return DenseQuantizers(
            input=self.quantizer("input"),
            kernel=self.quantizer("kernel"),
            gradient=self.quantizer("gradient"),
        )


@dataclass(frozen=True)
class DelayedScaling(_Formats):
    """One scale a tensor, from the largest magnitudes of steps before.

    Quantising takes one pass, as the scale is there before the values are. The state is explicit:
    `quantizer = quantizer.update(scaled.amax)` once a step.

    Args:
      format: of inputs and kernels, "float8_e4m3fn" | "float8_e5m2".
      gradient_format: of gradients.
      history_length: how many steps before count.
      amax_algorithm: "max" of them, or the "most_recent" one.
      margin: scales are 2^margin times as large as these ask for: room for growth.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433
    """

    history_length: int = 1024
    amax_algorithm: AmaxAlgorithm = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        op = "DelayedScaling"
        for name, least, most in (("history_length", 1, 2**20), ("margin", -64, 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                got, fix = f"a {type(value).__name__}", "It is static: pass a Python int."
                raise TypeError(wrong(op, name, got, "an int", fix))
            if not least <= value <= most:
                want, fix = f"{least} to {most}", f"The default is {_DEFAULTS[name]}."
                raise ValueError(wrong(op, name, repr(value), want, fix))
        check.one_of(op, "amax_algorithm", self.amax_algorithm, ("max", "most_recent"))

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser with an empty history: its first scale is 1 (times 2^margin)."""
        return delayed(
            self._checked(role, layout),
            layout,
            history=self.history_length,
            margin=self.margin,
            algorithm=self.amax_algorithm,
        )


_DEFAULTS = {"history_length": 1024, "margin": 0}


@dataclass(frozen=True)
class CurrentScaling(_Formats):
    """One scale a tensor, from its own largest magnitude: found in a first pass.

    Args:
      format: of inputs and kernels, "float8_e4m3fn" | "float8_e5m2".
      gradient_format: of gradients.
    """

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser without state."""
        return stateless(ScalingMode.TENSOR_CURRENT, self._checked(role, layout), layout)


@dataclass(frozen=True)
class Block128Scaling(_Formats):
    """A float32 scale for 1 x 128 elements of inputs and gradients, for 128 x 128 of kernels.

    Args:
      format: of inputs and kernels, "float8_e4m3fn" | "float8_e5m2".
      gradient_format: of gradients.
    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3
    """

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser without state."""
        format = self._checked(role, layout)
        block = (128, 128) if role == "kernel" else (1, 128)
        return stateless(ScalingMode.BLOCK_128, format, layout, block)


@dataclass(frozen=True)
class MXFP8Scaling(_Formats):
    """A power of two for each 32 elements.

    Args:
      format: of inputs and kernels, "float8_e4m3fn" | "float8_e5m2".
      gradient_format: of gradients.
    Source: OCP Microscaling Formats (MX) 1.0
    """

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser without state."""
        return stateless(ScalingMode.MXFP8, self._checked(role, layout), layout, (1, 32))
