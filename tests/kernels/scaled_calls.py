"""Products of quantised operands as a GPU lowers them, and what must come out, in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardops as so
from shardops.primitives.gemm_scaled_local import Scaled, scaled_gemm_kernel
from shardops.primitives.scaled import quantize_reference
from tests.closeness import assert_close
from tests.kernels.contractions import Contraction
from tests.kernels.gemm_calls import gelu, normal

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
CURRENT, BLOCK, MX = (
    so.ScalingMode.TENSOR_CURRENT,
    so.ScalingMode.BLOCK_128,
    so.ScalingMode.MXFP8,
)
LENGTH = {BLOCK: 128, MX: 32}


def in_float64(scaled: so.ScaledArray) -> np.ndarray:
    """What a quantised array stands for, exactly."""
    data = np.asarray(scaled.data).astype(np.float64)
    scales = np.asarray(scaled.scale_inv).astype(np.float64)
    for dim, block in enumerate(scaled.block or ()):
        scales = np.repeat(scales, block, dim).take(np.arange(data.shape[dim]), dim)
    return data * scales


class ScaledCall:
    """Operands with scales that differ by octaves, the jitted call, and what must come out.

    Args:
      blocked: letters along which each operand's blocks lie; None: along the last contracted one.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        text: str,
        sizes: dict[str, int],
        mode: so.ScalingMode,
        formats: tuple[str, str] = (E4M3, E4M3),
        *,
        batch: str = "",
        blocked: tuple[str, str] | None = None,
        epilogue: str = "none",
        bias: str | None = None,
        add: str | None = None,
        out: str = "bfloat16",
        precise: bool = False,
    ):
        shape_of = Contraction(text, batch)
        last = [c for c in shape_of.terms[0] if c in shape_of.terms[1] and c not in batch][-1]
        sides = []
        for term, fmt, along in zip(shape_of.terms, formats, blocked or (last, last), strict=True):
            shape = tuple(sizes[c] for c in term)
            octaves = np.exp2(rng.integers(-3, 4, shape[:1] + (1,) * (len(shape) - 1)))
            x = jnp.asarray(rng.standard_normal(shape) * octaves, jnp.float32)
            length = LENGTH.get(mode)
            block = None if length is None else tuple(length if c in along else 1 for c in term)
            sides.append(quantize_reference(x, mode, block, fmt))
        self.scaled, self.epilogue, self.out = sides, epilogue, out
        self.reduced = int(np.prod([sizes[c] for c in term_of(shape_of)]))
        extra = []
        if bias:
            extra.append(normal(rng, tuple(sizes[c] for c in shape_of.rhs_free), bias))
        if add:
            extra.append(normal(rng, tuple(sizes[c] for c in shape_of.result), add))
        self.operands = [*(a for s in sides for a in (s.data, s.scale_inv)), *extra]
        self.function: Any = jax.jit(
            partial(
                scaled_gemm_kernel,
                lhs=Scaled.of(sides[0]),
                rhs=Scaled.of(sides[1]),
                contracting=shape_of.contracting,
                batch=shape_of.batch_dims,
                bias=bool(bias),
                add=bool(add),
                epilogue=epilogue,
                out_dtype=out,
                precision=None,
                precise=precise,
            )
        )
        z = shape_of.product(*map(in_float64, sides))
        for array in extra:
            z = z + np.asarray(array).astype(np.float64)
        self.want = {"gelu": (gelu(z),), "gelu_aux": (gelu(z), z)}.get(epilogue, (z,))

    def check(self, dtype: Any = None) -> None:
        """`dtype`: that the result is as good as, if it is worse than its own."""
        got = self.function(*self.operands)
        assert len(got) == len(self.want)
        for value, want in zip(got, self.want, strict=True):
            assert value.dtype == self.out
            assert_close(value, want, reduced=self.reduced, dtype=dtype)

    def text(self) -> str:
        return self.function.lower(*self.operands).as_text()


def term_of(contraction: Contraction) -> list[str]:
    lhs, rhs = contraction.terms
    return [c for c in lhs if c in rhs and c not in contraction.batch]
