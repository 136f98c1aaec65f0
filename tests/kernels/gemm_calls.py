"""Calls of `kernels.gemm` on random operands, and what must come out of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import gemm as kernels
from tests.closeness import assert_close
from tests.kernels.contractions import Contraction

DTYPES = ("float32", "bfloat16", "float16")
EPILOGUES = ("none", "bias", "gelu", "gelu_aux", "relu")


def gelu(z: np.ndarray) -> np.ndarray:
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


class Call:
    """Random operands of a product, the jitted call, and what must come out."""

    def __init__(
        self,
        rng: np.random.Generator,
        contraction: Contraction,
        sizes: dict[str, int],
        dtype: str,
        *,
        epilogue: str = "none",
        bias: str | None = None,
        add: str | None = None,
        out: str | None = None,
        precision: Any = None,
    ):
        self.epilogue, self.out = epilogue, out or dtype
        lhs, rhs = contraction.shapes(sizes)
        self.operands = [normal(rng, lhs, dtype), normal(rng, rhs, dtype), None, None]
        self.reduced = int(np.prod([lhs[d] for d in contraction.contracting[0]]))
        if bias:
            shape = tuple(sizes[c] for c in contraction.rhs_free)
            self.operands[2] = normal(rng, shape, bias)
        if add:
            self.operands[3] = normal(rng, tuple(sizes[c] for c in contraction.result), add)
        self.function = jax.jit(
            partial(
                kernels.gemm,
                contracting=contraction.contracting,
                batch=contraction.batch_dims,
                epilogue=epilogue,
                out_dtype=self.out,
                precision=precision,
            )
        )
        z = contraction.product(*(np.asarray(x) for x in self.operands[:2]))
        for extra in self.operands[2:]:
            z = z if extra is None else z + np.asarray(extra).astype(np.float64)
        self.want = {
            "gelu": (gelu(z),),
            "gelu_aux": (gelu(z), z),
            "relu": (np.maximum(z, 0),),
        }.get(epilogue, (z,))

    def check(self) -> None:
        got = self.function(*self.operands)
        assert len(got) == len(self.want)
        for value, want in zip(got, self.want, strict=True):
            assert value.dtype == self.out
            assert_close(value, want, reduced=self.reduced)

    def text(self) -> str:
        return self.function.lower(*self.operands).as_text()
