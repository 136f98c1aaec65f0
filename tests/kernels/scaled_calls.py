"""Products of quantised operands as a GPU lowers them, and what must come out, in float64."""

import re
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


def _quantize(x: np.ndarray, mode: so.ScalingMode, block: Any, fmt: str) -> so.ScaledArray:
    """On the CPU, where the reference is one program; then on the default device."""
    with jax.default_device(jax.devices("cpu")[0]):
        scaled = jax.jit(lambda x: quantize_reference(x, mode, block, fmt))(x)
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), scaled)


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
            x = (rng.standard_normal(shape) * octaves).astype(np.float32)
            length = LENGTH.get(mode)
            block = None if length is None else tuple(length if c in along else 1 for c in term)
            sides.append(_quantize(x, mode, block, fmt))
        self.scaled, self.out = sides, out
        self.fast = mode is CURRENT and not precise
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

    def check(self, tensor_cores: bool = False) -> None:
        """`tensor_cores`: that sums are as good as those of Hopper's are for 8-bit operands.

        These keep about 14 bits (DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3.2). So a sum is
        as good as float16 where it goes to float32 every 128 products. Fast accumulation may lose
        2^-14 of it after each 32 products; in roundings to float16, k / 512 in all.
        """
        got = self.function(*self.operands)
        assert len(got) == len(self.want)
        narrow = tensor_cores and self.out == "float32"
        roundings = 1 + (self.reduced / 512 if tensor_cores and self.fast else 0)
        for value, want in zip(got, self.want, strict=True):
            assert value.dtype == self.out
            assert_close(
                value,
                want,
                reduced=self.reduced,
                dtype=np.float16 if narrow else None,
                roundings=roundings if self.out != "bfloat16" else 1,
            )

    def text(self) -> str:
        return self.function.lower(*self.operands).as_text()


def term_of(contraction: Contraction) -> list[str]:
    lhs, rhs = contraction.terms
    return [c for c in lhs if c in rhs and c not in contraction.batch]


def attribute(text: str, name: str) -> int:
    """Of the one call of the handler in a program; 0 where it is left to its default."""
    (call,) = (line for line in text.splitlines() if "@shardops_gemm" in line)
    found = re.search(rf"\b{name} = (-?\d+) : i64", call)
    return int(found[1]) if found else 0


def runs_in_fp8(
    call: ScaledCall, formats: tuple[str, str] = PAIRS[0], *, tensor_cores: bool = False
) -> str:
    """Checks values and types; returns the program."""
    call.check(tensor_cores)
    text = call.text()
    codes = {"float8_e4m3fn": 28, "float8_e5m2": 29}
    assert attribute(text, "type") == codes[formats[0]]
    assert attribute(text, "type_b") == codes[formats[1]]
    assert (attribute(text, "transa"), attribute(text, "transb")) == (0, 1)
    return text


def holds_no_dequantised_array(text: str, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        dims = "x".join(map(str, shape))
        assert f"tensor<{dims}xf8E4M3FN>" in text
        for wide in ("f32", "bf16", "f16"):
            assert f"tensor<{dims}x{wide}>" not in text
