"""Softmax calls that the kernel tests share, in float64, and how a plan runs on the emulator."""

import math
import pathlib
from dataclasses import dataclass

import numpy as np

from shardops.kernels import softmax, softmax_plan
from shardops.kernels.softmax_plan import Geometry, Plan, SoftmaxProblem
from shardops.kernels.target import Target
from tests.kernels import emulator
from tests.kernels.norm_problems import DTYPES, blank


@dataclass(frozen=True)
class Case:
    """A call on x of `shape`; `mask` is the shape of one."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    mask: tuple[int, ...] | None = None
    diagonal: int | None = None
    first: int | None = None
    scale: float = 0.7
    offset: int = 0  # elements that each buffer starts past a 16-byte boundary

    @property
    def digits(self) -> tuple[tuple[int, int], ...]:
        return () if self.mask is None else softmax_plan.mask_rows(self.shape[:-1], self.mask[:-1])

    def problem(self) -> SoftmaxProblem:
        kind = 0 if self.mask is None else 1 if self.mask[-1] == self.shape[-1] else 2
        return SoftmaxProblem(
            rows=math.prod(self.shape[:-1]),
            keys=self.shape[-1],
            x=self.dtype,
            mask=kind,
            digits=len(self.digits),
            causal=self.diagonal is not None,
            first=self.first is not None,
            sign=(self.scale > 0) - (self.scale < 0),
        )

    def draw(self, rng: np.random.Generator, offset: int | None = None) -> np.ndarray:
        """Random numbers, `offset` elements past a boundary of 16 bytes."""
        values = blank(self.shape, self.dtype, self.offset if offset is None else offset)
        values[...] = (2 * rng.standard_normal(self.shape)).astype(values.dtype)
        return values

    def draw_mask(self, rng: np.random.Generator) -> np.ndarray | None:
        """A third is hidden; of some rows all."""
        if self.mask is None:
            return None
        padded = np.zeros(math.prod(self.mask) + self.offset, bool)
        mask = padded[self.offset :].reshape(self.mask)
        mask[...] = rng.random(self.mask) < 0.33
        mask.reshape(-1, self.mask[-1])[1:2] = True
        return mask

    def hidden(self, mask: np.ndarray | None) -> np.ndarray:
        hidden = np.zeros(self.shape, bool)
        if mask is not None:
            hidden |= mask
        if self.diagonal is not None:
            queries, keys = self.shape[-2:]
            last = np.arange(queries)[:, None] + (self.first or 0) + self.diagonal
            hidden |= np.arange(keys) > last
        return hidden


def forward_float64(x: np.ndarray, hidden: np.ndarray, scale: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        z = np.where(hidden, -np.inf, scale * x.astype(np.float64))
        e = np.where(hidden, 0, np.exp(z - z.max(-1, keepdims=True)))
        return np.where(hidden, 0, e / e.sum(-1, keepdims=True))


def backward_float64(dy: np.ndarray, y: np.ndarray, later: np.ndarray, scale: float) -> np.ndarray:
    """From the y that is stored; `later` are the keys that a causal mask hides."""
    dy, y = (np.where(later, 0, a.astype(np.float64)) for a in (dy, y))
    with np.errstate(invalid="ignore"):
        dx = scale * y * (dy - (y * dy).sum(-1, keepdims=True))
    return np.where(later, 0, dx)


def run_forward(
    case: Case,
    target: Target,
    folder: pathlib.Path,
    x: np.ndarray,
    mask: np.ndarray | None = None,
    geometry: Geometry | None = None,
) -> np.ndarray:
    plan = softmax_plan.forward_plan(case.problem(), target, geometry)
    params = softmax.forward_params(case.shape, case.scale, case.diagonal, case.digits)
    return _run(plan, case, folder, [x, mask, _first(case)], params)


def run_backward(
    case: Case,
    target: Target,
    folder: pathlib.Path,
    dy: np.ndarray,
    y: np.ndarray,
    geometry: Geometry | None = None,
) -> np.ndarray:
    plan = softmax_plan.backward_plan(case.problem(), target, geometry)
    params = softmax.backward_params(case.shape, case.scale, case.diagonal)
    return _run(plan, case, folder, [dy, y, _first(case)], params)


def _first(case: Case) -> np.ndarray | None:
    return None if case.first is None else np.array(case.first, np.int32)


def _run(
    plan: Plan,
    case: Case,
    folder: pathlib.Path,
    operands: list[np.ndarray | None],
    params: np.void,
) -> np.ndarray:
    arrays = [operand for operand in operands if operand is not None]
    result = blank(case.shape, case.dtype, case.offset)
    assert result.dtype == DTYPES[case.dtype]
    if plan.workspace is None:
        emulator.run(plan.launches[0], folder, arrays, [result], [params])
    elif len(plan.launches) == 1:
        pairs = np.zeros(plan.workspace, np.uint32)
        emulator.run(plan.launches[0], folder, arrays, [result, pairs], [params])
    else:
        parts = blank(plan.workspace, "float32")
        emulator.run(plan.launches[0], folder, arrays, [parts], [params])
        emulator.run(plan.launches[1], folder, [*arrays, parts], [result], [params])
    return result
