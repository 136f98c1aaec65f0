"""How a product of quantised operands runs on one GPU: pure functions of shapes and blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from shardops.kernels.sizes import round_up

Dims = tuple[int, ...]
DimPair = tuple[Dims, Dims]
Kind = Literal["none", "tensor", "block_128", "mxfp8"]
Route = Literal["fp8", "bfloat16", "float32"]

E5M2 = "float8_e5m2"
_BLOCK = {"block_128": 128, "mxfp8": 32}
_SCALES = {
    "tensor": "one scale",
    "block_128": "scales of 128 elements",
    "mxfp8": "MXFP8 scales",
}
# A launch brings MXFP8 scales into cuBLASLt's order, 128 x 64 a block, by 32-bit numbers.
_MOST_ROWS, _MOST_SCALES = 2**31, 2**43
_MULTIPLE = 16  # cuBLASLt: of n and k, and so of every leading dimension, with 8-bit operands


class ScaleMode(IntEnum):
    """As csrc/gemm_problem.h has it."""

    NONE = 0
    TENSOR = 1
    VEC_128 = 2
    BLOCK_128 = 3
    VEC_32 = 4


@dataclass(frozen=True)
class Side:
    """An operand.

    Args:
      dtype: of the data.
      kind: of the scales; "none" for an array that is not quantised.
      block: elements that a scale covers, one number a dim; None: all.
    """

    shape: Dims
    dtype: str
    kind: Kind
    block: Dims | None = None


@dataclass(frozen=True)
class Matrix:
    """An operand as [batch, rows, k]: transposed by `order`, then reshaped.

    Args:
      contracted: how many dims of `order`, the last ones, k is made of.
      scale: how its scales lie.
    """

    order: Dims
    contracted: int
    batch: int
    rows: int
    k: int
    scale: ScaleMode

    @property
    def in_place(self) -> bool:
        """Whether nothing is moved."""
        return self.order == tuple(range(len(self.order)))


@dataclass(frozen=True)
class Native:
    """One cuBLASLt call on the 8-bit data.

    Args:
      result: its shape.
      m, n, k: what the operands are padded to with zeros.
    """

    lhs: Matrix
    rhs: Matrix
    result: Dims
    m: int
    n: int
    k: int

    @property
    def padded(self) -> bool:
        """Whether the result has to be cut."""
        return (self.m, self.n) != (self.lhs.rows, self.rhs.rows)


@dataclass(frozen=True)
class ScaledPlan:
    """Which way, and why.

    Args:
      native: one call on the 8-bit data; None where there is none.
      exact: what to do without it. True: multiply in bfloat16, which holds the values (but for
        those below its normal range), scales of a tensor applied to the float32 result. False:
        dequantise to float32, rounded once, and multiply in that.
    """

    why: str
    exact: bool
    native: Native | None = None

    @property
    def route(self) -> Route:
        """What the product is computed in."""
        if self.native is not None:
            return "fp8"
        return "bfloat16" if self.exact else "float32"


def scaled_plan(
    lhs: Side, rhs: Side, contracting: DimPair, batch: DimPair, arch: str
) -> ScaledPlan:
    """Plans a product for a GPU of an architecture such as "sm_90"."""
    reason = _unsupported(lhs, rhs, arch)
    native = _native(lhs, rhs, contracting, batch) if reason is None else reason
    exact = all(s.kind in ("tensor", "mxfp8") or s.dtype == "bfloat16" for s in (lhs, rhs))
    if isinstance(native, Native):
        return ScaledPlan(_described(lhs, native), exact, native)
    instead = "bfloat16, which holds the values" if exact else "float32, dequantised"
    return ScaledPlan(f"{native}, so in {instead}", exact)


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


def has_mxfp8(arch: str) -> bool:
    """Whether GPUs of an architecture multiply 8-bit numbers with scales of 32."""
    return _number(arch) >= 100


def _unsupported(lhs: Side, rhs: Side, arch: str) -> str | None:
    """Why cuBLASLt has no product of such operands, whatever their shapes."""
    for name, side in (("lhs", lhs), ("rhs", rhs)):
        if side.kind == "none":
            return f"{name} is not quantised"
    if lhs.kind != rhs.kind:
        return f"lhs has {_SCALES[lhs.kind]}, rhs has {_SCALES[rhs.kind]}"
    if lhs.dtype == rhs.dtype == E5M2:
        return "cuBLASLt multiplies no E5M2 by E5M2"
    if _number(arch) < 89:
        return f"{arch} has no FP8 tensor cores"
    if lhs.kind == "block_128" and _number(arch) != 90:
        return "cuBLASLt has scales of 128 elements on sm_90 alone"
    if lhs.kind == "mxfp8" and not has_mxfp8(arch):
        return f"{arch} has no MXFP8 tensor cores"
    return None


def _native(lhs: Side, rhs: Side, contracting: DimPair, batch: DimPair) -> Native | str:
    """The call, or why there is none."""
    order = _contraction(lhs, rhs, contracting)
    if isinstance(order, str):
        return order
    a, b = (
        _matrix(side, tuple(pair[i] for pair in order), batch[i])
        for i, side in enumerate((lhs, rhs))
    )
    if isinstance(a, str) or isinstance(b, str):
        return f"lhs: {a}" if isinstance(a, str) else f"rhs: {b}"
    if a.scale is b.scale is ScaleMode.BLOCK_128:
        return "cuBLASLt takes 128 x 128 blocks of one operand only"
    blocks = a.scale > ScaleMode.TENSOR
    if blocks and a.batch > 1:
        return "cuBLASLt takes scales of blocks without batch dims only"
    if a.scale is ScaleMode.VEC_32:
        for name, matrix in (("lhs", a), ("rhs", b)):
            if _too_many_scales(matrix):
                return f"{name} has too many scales: {matrix.rows} x {-(-matrix.k // 32)}"
    free = [
        side.shape[d]
        for side, matrix, i in ((lhs, a, 0), (rhs, b, 1))
        for d in matrix.order[len(batch[i]) : len(side.shape) - len(order)]
    ]
    return Native(
        a,
        b,
        (*(lhs.shape[d] for d in batch[0]), *free),
        m=round_up(a.rows, 4 if blocks else 1),
        n=round_up(b.rows, _MULTIPLE),
        k=round_up(a.k, 32 if a.scale is ScaleMode.VEC_32 else _MULTIPLE),
    )


def _too_many_scales(matrix: Matrix) -> bool:
    scales = round_up(matrix.rows, 128) * round_up(-(-matrix.k // 32), 64)
    return matrix.rows >= _MOST_ROWS or scales >= _MOST_SCALES


def _contraction(lhs: Side, rhs: Side, contracting: DimPair) -> list[tuple[int, int]] | str:
    """The order of the contracted pairs in k: blocks lie along the last one.

    Without blocks it is the order of the operand that would be longer to transpose.
    """
    pairs = list(zip(*contracting, strict=True))
    if lhs.kind not in _BLOCK:
        longer = int(math.prod(rhs.shape) > math.prod(lhs.shape))
        return sorted(pairs, key=lambda pair: pair[longer])
    along = [
        [p for p in pairs if side.block and side.block[p[i]] > 1]
        for i, side in enumerate((lhs, rhs))
    ]
    if along[0] != along[1] or len(along[0]) != 1:
        return "the blocks do not lie along one contracted dim of both"
    (last,) = along[0]
    rest = [p for p in pairs if p != last]
    if any(lhs.shape[p[0]] > 1 for p in rest) and lhs.shape[last[0]] % _BLOCK[lhs.kind]:
        return "blocks reach over the end of the last contracted dim"
    return [*rest, last]


def _matrix(side: Side, contracted: Dims, batch: Dims) -> Matrix | str:
    free = tuple(d for d in range(len(side.shape)) if d not in (*contracted, *batch))
    scale = {
        "tensor": ScaleMode.TENSOR,
        "block_128": ScaleMode.VEC_128,
        "mxfp8": ScaleMode.VEC_32,
    }[side.kind]
    blocked = [d for d in (*batch, *free) if side.block and side.block[d] > 1]
    if blocked:
        if blocked != [*free[-1:]]:
            return "its blocks do not lie along its last free dim"
        if math.prod(side.shape[d] for d in free[:-1]) > 1 and side.shape[free[-1]] % 128:
            return "blocks reach over the end of its last free dim"
        scale = ScaleMode.BLOCK_128
    return Matrix(
        (*batch, *free, *contracted),
        len(contracted),
        math.prod(side.shape[d] for d in batch),
        math.prod(side.shape[d] for d in free),
        math.prod(side.shape[d] for d in contracted),
        scale,
    )


def _described(lhs: Side, native: Native) -> str:
    """What the call costs besides."""
    notes = [f"FP8 tensor cores, {_SCALES[lhs.kind]}"]
    moved = [n for n, m in (("lhs", native.lhs), ("rhs", native.rhs)) if not m.in_place]
    if moved:
        notes.append(f"the 8-bit data of {' and '.join(moved)} are transposed first")
    sizes: Sequence[tuple[str, int, int]] = (
        ("m", native.lhs.rows, native.m),
        ("n", native.rhs.rows, native.n),
        ("k", native.lhs.k, native.k),
    )
    notes += [f"{name} is padded from {old} to {new}" for name, old, new in sizes if old != new]
    return "; ".join(notes)
