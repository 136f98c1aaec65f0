"""The argument cases that tests and benchmarks share: shapes, dims, dtypes, options."""

import dataclasses
import math

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

Dims = tuple[int, ...]
Pair = tuple[Dims, Dims]


def random(rng: np.random.Generator, shape: Dims, dtype="float32", scale: float = 1.0):
    """Standard normal values, rounded to `dtype` once."""
    return (scale * rng.standard_normal(shape)).astype(DTYPES[dtype])


# --- gemm -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GemmCase:
    id: str
    lhs: Dims
    rhs: Dims
    contracting: Pair = ((-1,), (0,))
    bias: bool = False
    activation: str | None = None
    add: bool = False
    out_dtype: str | None = None

    @property
    def lhs_free(self) -> Dims:
        return _free(self.lhs, self.contracting[0])

    @property
    def rhs_free(self) -> Dims:
        return _free(self.rhs, self.contracting[1])

    @property
    def reduced(self) -> int:
        return math.prod(self.lhs[d] for d in self.contracting[0])


def _free(shape: Dims, taken: Dims) -> Dims:
    taken = tuple(d % len(shape) for d in taken)
    return tuple(n for d, n in enumerate(shape) if d not in taken)


GEMM_SHAPES = [
    GemmCase("matrix", (5, 7), (7, 3)),
    GemmCase("no-leading-dim", (7,), (7, 3)),
    GemmCase("two-leading-dims", (2, 5, 7), (7, 3)),
    GemmCase("three-leading-dims", (2, 3, 5, 7), (7, 3)),
    GemmCase("rhs-vector", (5, 7), (7,)),
    GemmCase("two-vectors", (7,), (7,)),
    GemmCase("rhs-with-two-free-dims", (2, 5, 7), (7, 3, 4)),
    GemmCase("two-contracting-dims", (5, 6, 8), (6, 8, 3), ((1, 2), (0, 1))),
    GemmCase("listed-in-another-order", (5, 6, 8), (6, 8, 3), ((2, 1), (1, 0))),
    GemmCase("rhs-holds-them-in-another-order", (5, 6, 8), (8, 6, 3), ((1, 2), (1, 0))),
    GemmCase("apart", (6, 4, 8), (8, 3, 6), ((0, 2), (2, 0))),
    GemmCase("weight-gradient", (2, 5, 7), (2, 5, 3), ((0, 1), (0, 1))),
    GemmCase("rhs-transposed", (5, 7), (3, 7), ((1,), (1,))),
    GemmCase("both-transposed", (7, 5), (3, 7), ((0,), (-1,))),
    GemmCase("everything-contracted", (4, 6), (4, 6), ((0, 1), (0, 1))),
    GemmCase("dense-general", (2, 5, 4, 6), (4, 6, 3, 2), ((-2, -1), (0, 1))),
    GemmCase("size-one", (1, 1), (1, 1)),
    GemmCase("long", (3, 1000), (1000, 5)),
]

GEMM_EMPTY = [
    GemmCase("no-rows", (3, 0, 8), (8, 5), bias=True),
    GemmCase("no-columns", (4, 8), (8, 0), bias=True),
    GemmCase("nothing-to-sum", (4, 0), (0, 5)),
    GemmCase("nothing-to-sum-then-bias", (4, 0), (0, 5), bias=True, activation="gelu"),
    GemmCase("nothing-to-sum-then-add", (4, 0), (0, 5), add=True),
    GemmCase("nothing-at-all", (0, 0), (0, 0)),
]

_MLP = {"lhs": (3, 8, 16), "rhs": (16, 24)}

GEMM_EPILOGUES = [
    GemmCase("bias", **_MLP, bias=True),
    GemmCase("gelu", **_MLP, activation="gelu"),
    GemmCase("silu", **_MLP, activation="silu"),
    GemmCase("relu", **_MLP, activation="relu"),
    GemmCase("bias-gelu", **_MLP, bias=True, activation="gelu"),
    GemmCase("bias-silu", **_MLP, bias=True, activation="silu"),
    GemmCase("bias-relu", **_MLP, bias=True, activation="relu"),
    GemmCase("add", **_MLP, add=True),
    GemmCase("add-bias", **_MLP, add=True, bias=True),
    GemmCase("add-bias-gelu", **_MLP, add=True, bias=True, activation="gelu"),
    GemmCase("bias-of-two-dims-gelu", (3, 8, 16), (16, 4, 6), bias=True, activation="gelu"),
    GemmCase("bias-no-leading-dim", (16,), (16, 24), bias=True, activation="silu"),
    GemmCase("out-float32", **_MLP, out_dtype="float32"),
    GemmCase("out-bfloat16", **_MLP, out_dtype="bfloat16"),
    GemmCase("out-float32-bias-gelu", **_MLP, bias=True, activation="gelu", out_dtype="float32"),
    GemmCase("out-float32-add", **_MLP, add=True, out_dtype="float32"),
]


# --- dot_general ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DotCase:
    id: str
    lhs: Dims
    rhs: Dims
    contracting: Pair
    batch: Pair = ((), ())

    @property
    def numbers(self) -> tuple[Pair, Pair]:
        return (self.contracting, self.batch)

    @property
    def reduced(self) -> int:
        return math.prod(self.lhs[d] for d in self.contracting[0])


DOT_CASES = [
    DotCase("matrix", (5, 7), (7, 3), ((1,), (0,))),
    DotCase("outer-product", (5,), (3,), ((), ())),
    DotCase("batched", (4, 5, 7), (4, 7, 3), ((2,), (1,)), ((0,), (0,))),
    DotCase("two-batch-dims", (2, 4, 5, 7), (2, 4, 7, 3), ((3,), (2,)), ((0, 1), (0, 1))),
    DotCase("attention-scores", (2, 5, 4, 7), (2, 6, 4, 7), ((3,), (3,)), ((0, 2), (0, 2))),
    DotCase("attention-values", (2, 4, 5, 6), (2, 6, 4, 7), ((3,), (1,)), ((0, 1), (0, 2))),
    DotCase("batch-last", (5, 7, 4), (7, 3, 4), ((1,), (0,)), ((2,), (2,))),
    DotCase("batch-in-another-order", (2, 4, 5, 7), (4, 2, 7, 3), ((3,), (2,)), ((1, 0), (0, 1))),
    DotCase("batch-two-contracting", (3, 4, 5, 6), (5, 3, 6, 2), ((2, 3), (0, 2)), ((0,), (1,))),
    DotCase("batch-alone", (4, 5), (4, 5), ((), ()), ((0, 1), (0, 1))),
    DotCase("batched-vectors", (4, 7), (4, 7), ((1,), (1,)), ((0,), (0,))),
    DotCase("no-batch-entries", (0, 5, 7), (0, 7, 3), ((2,), (1,)), ((0,), (0,))),
    DotCase("nothing-to-sum", (4, 5, 0), (4, 0, 3), ((2,), (1,)), ((0,), (0,))),
]


# --- norms ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NormCase:
    id: str
    shape: Dims
    gamma_dtype: str | None = None  # that of x
    beta: bool = False  # layer norm alone
    add: bool = False
    return_input: bool = False
    zero_centered_gamma: bool = False
    epsilon: float = 1e-6

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


NORM_CASES = [
    NormCase("matrix", (6, 64)),
    NormCase("no-leading-dim", (64,)),
    NormCase("two-leading-dims", (2, 3, 64)),
    NormCase("three-leading-dims", (2, 3, 5, 64)),
    NormCase("odd-length", (5, 33)),
    NormCase("one-row", (1, 96)),
    NormCase("length-one", (4, 1), epsilon=1e-2),
    NormCase("long-rows", (2, 4096)),
    NormCase("many-rows", (512, 8)),
    NormCase("large-epsilon", (6, 64), epsilon=0.5),
    NormCase("zero-centred", (6, 64), zero_centered_gamma=True),
    NormCase("gamma-float32", (6, 64), gamma_dtype="float32"),
    NormCase("gamma-bfloat16", (6, 64), gamma_dtype="bfloat16", zero_centered_gamma=True),
    NormCase("gamma-float16", (6, 64), gamma_dtype="float16"),
    NormCase("add", (2, 3, 64), add=True),
    NormCase("return-input", (2, 3, 64), return_input=True),
    NormCase("add-return-input", (2, 3, 64), add=True, return_input=True),
    NormCase(
        "everything",
        (2, 3, 64),
        gamma_dtype="float32",
        beta=True,
        add=True,
        return_input=True,
        zero_centered_gamma=True,
        epsilon=1e-3,
    ),
    NormCase("beta", (6, 64), beta=True),
    NormCase("beta-mixed", (2, 3, 64), gamma_dtype="float32", beta=True),
]

NORM_EMPTY = [
    NormCase("no-rows", (0, 64), beta=True),
    NormCase("no-batch", (3, 0, 2520), beta=True),
    NormCase("no-batch-add", (0, 5, 16), add=True, return_input=True),
]
