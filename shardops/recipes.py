"""Recipes of quantisation: each makes the quantisers of a product's operands.

    recipe = so.recipes.DelayedScaling()
    q = recipe.quantizer(role="input")
    scaled = so.quantize(x, q)
    q = q.update(scaled.amax)  # once a step

and those of a dense layer, whose backward pass quantises too:

    qs = recipe.dense_quantizers()
    y = so.dense(x, kernel, quantizers=qs)

A role says which operand: "input" (activations), "kernel" (weights) or "gradient" (cotangents). Its
format is as the `formats` of a recipe say: "HYBRID", inputs and kernels E4M3, and gradients E5M2,
which has more range and less precision; or "E4M3", all three. Quantisers of other formats are made
of these: `dataclasses.replace(quantizer, format="float8_e5m2")`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from shardops.errors import shown, wrong
from shardops.primitives import check
from shardops.primitives.scaling import ScalingMode
from shardops.quantizer import AmaxCompute, DenseQuantizers, Quantizer, delayed, stateless
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
Formats = Literal["E4M3", "HYBRID"]


class _Recipe:
    formats: Formats

    def __post_init__(self) -> None:
        check.one_of(type(self).__name__, "formats", self.formats, ("E4M3", "HYBRID"))

    def _format(self, role: Any, layout: Any) -> str:
        """The format of a role, both checked."""
        op = type(self).__name__
        check.one_of(op, "role", role, ("input", "kernel", "gradient"))
        check.one_of(op, "layout", layout, ("rows", "columns", "both"))
        wide = role == "gradient" and self.formats == "HYBRID"
        return "float8_e5m2" if wide else "float8_e4m3fn"

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """The quantiser of one operand."""
        raise NotImplementedError

    def dense_quantizers(self) -> DenseQuantizers:
        """The quantisers of a dense layer, one for each role; `so.layer_norm_mlp` takes a pair."""
        return DenseQuantizers(
            input=self.quantizer("input"),
            kernel=self.quantizer("kernel"),
            gradient=self.quantizer("gradient"),
        )


@dataclass(frozen=True)
class DelayedScaling(_Recipe):
    """One scale a tensor, from the largest magnitudes of steps before.

    Quantising takes one pass, as the scale is there before the values are. The state is explicit:
    `quantizer = quantizer.update(scaled.amax)` once a step.

    Args:
      margin: scales are 2^margin times as large as the history asks for: room for growth.
      amax_history_len: how many steps before count.
      amax_compute: the "max" of them, or the "most_recent" one.
      formats: "HYBRID" | "E4M3".
    Raises: TypeError for counts that are no int, ValueError for settings that there are not.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute: AmaxCompute = "max"
    formats: Formats = "HYBRID"

    def __post_init__(self) -> None:
        super().__post_init__()
        op = "DelayedScaling"
        for name, least, most in (("margin", -64, 64), ("amax_history_len", 1, 2**20)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                got, fix = f"a {type(value).__name__}", "It is static: pass a Python int."
                raise TypeError(wrong(op, name, got, "an int", fix))
            if not least <= value <= most:
                want, fix = f"{least} to {most}", f"The default is {_DEFAULTS[name]}."
                raise ValueError(wrong(op, name, shown(value), want, fix))
        check.one_of(op, "amax_compute", self.amax_compute, ("max", "most_recent"))

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser with an empty history: its first scale is 1 (times 2^margin).

        Args:
          role: "input" | "kernel" | "gradient": it decides the format.
          layout: what is written, as in `so.quantize`.
        Raises: ValueError for another role or layout.
        """
        return delayed(
            self._format(role, layout),
            layout,
            history=self.amax_history_len,
            margin=self.margin,
            algorithm=self.amax_compute,
        )


_DEFAULTS = {"margin": 0, "amax_history_len": 1024}


@dataclass(frozen=True)
class CurrentScaling(_Recipe):
    """One scale a tensor, from its own largest magnitude: found in a first pass.

    Args:
      formats: "HYBRID" | "E4M3".
    Raises: ValueError for other formats.
    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433
    """

    formats: Formats = "HYBRID"

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser without state.

        Args:
          role: "input" | "kernel" | "gradient": it decides the format.
          layout: what is written, as in `so.quantize`.
        Raises: ValueError for another role or layout.
        """
        return stateless(ScalingMode.TENSOR_CURRENT, self._format(role, layout), layout)


@dataclass(frozen=True)
class Block128Scaling(_Recipe):
    """A float32 scale for 1 x 128 elements of inputs and gradients, for 128 x 128 of kernels.

    Args:
      formats: "HYBRID" | "E4M3".
    Raises: ValueError for other formats.
    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3
    """

    formats: Formats = "HYBRID"

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser without state.

        Args:
          role: "input" | "kernel" | "gradient": it decides the format and the block.
          layout: what is written, as in `so.quantize`.
        Raises: ValueError for another role or layout.
        """
        format = self._format(role, layout)
        block = (128, 128) if role == "kernel" else (1, 128)
        return stateless(ScalingMode.BLOCK_128, format, layout, block)


@dataclass(frozen=True)
class MXFP8Scaling(_Recipe):
    """A power of two for each 32 elements.

    Args:
      formats: "HYBRID" | "E4M3".
    Raises: ValueError for other formats.
    Source: OCP Microscaling Formats (MX) 1.0, section 6.3
    """

    formats: Formats = "HYBRID"

    def quantizer(self, role: Role = "input", layout: Layout = "rows") -> Quantizer:
        """A quantiser without state.

        Args:
          role: "input" | "kernel" | "gradient": it decides the format.
          layout: what is written, as in `so.quantize`.
        Raises: ValueError for another role or layout.
        """
        return stateless(ScalingMode.MXFP8, self._format(role, layout), layout, (1, 32))
