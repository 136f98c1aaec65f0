"""Softmax calls that are timed: their arrays, the bytes that they must move, and raw launches."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raw_launch import Call, Device, numbers
from shardops.kernels import softmax, softmax_plan
from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.softmax_plan import Plan, SoftmaxProblem

SCALE = 0.125
# plain; later keys hidden; a mask of the batch's keys; one of queries and keys, shared by heads.
KINDS = ("plain", "causal", "masked", "heads")


@dataclass(frozen=True)
class Case:
    """Forward or backward of logits of `shape`, [batch, heads, queries, keys]."""

    direction: str
    kind: str
    shape: tuple[int, int, int, int]
    dtype: str

    @property
    def operands(self) -> int:
        return 1 if self.direction == "forward" else 2

    @property
    def masked(self) -> bool:
        return self.direction == "forward" and self.kind in ("masked", "heads")

    @property
    def mask_shape(self) -> tuple[int, int, int, int]:
        batch, _, queries, keys = self.shape
        return (batch, 1, queries if self.kind == "heads" else 1, keys)

    @property
    def digits(self) -> tuple[tuple[int, int], ...]:
        return softmax_plan.mask_rows(self.shape[:-1], self.mask_shape[:-1]) if self.masked else ()

    @property
    def diagonal(self) -> int | None:
        return 0 if self.kind == "causal" else None

    @property
    def problem(self) -> SoftmaxProblem:
        return SoftmaxProblem(
            rows=math.prod(self.shape[:-1]),
            keys=self.shape[-1],
            x=self.dtype,
            mask=1 if self.masked else 0,
            digits=len(self.digits),
            causal=self.diagonal is not None,
        )

    @cached_property
    def bytes(self) -> int:
        """Operands, as far as they are seen, once, and the result once."""
        *batch, queries, keys = self.shape
        seen = math.prod(self.shape)
        if self.kind == "causal":
            seen = math.prod(batch) * sum(min(q + 1, keys) for q in range(queries))
        elements = self.operands * seen + math.prod(self.shape)
        return elements * TYPE_BYTES[self.dtype] + self.masked * math.prod(self.mask_shape)

    def arrays(self, seed: int) -> list[jax.Array]:
        """dy and y, or x and perhaps a mask; y is a softmax, so that gradients are of its size."""
        draw = jax.random.normal(jax.random.key(seed), self.shape, jnp.dtype(self.dtype))
        if self.direction == "backward":
            logits = jax.random.normal(jax.random.key(seed + 1), self.shape, jnp.float32)
            return [draw, jax.nn.softmax(logits).astype(self.dtype)]
        if self.masked:
            return [draw, jax.random.uniform(jax.random.key(99), self.mask_shape) < 0.3]
        return [draw]

    def plan(self, target: Any, geometry: Any = None) -> Plan:
        if self.direction == "forward":
            return softmax_plan.forward_plan(self.problem, target, geometry)
        return softmax_plan.backward_plan(self.problem, target, geometry)


def shape_of(kind: str, rows: int, keys: int) -> tuple[int, int, int, int]:
    """[batch, heads, queries, keys] of so many rows; masks are shared by up to 16 heads."""
    queries = min(keys if kind == "causal" else 1024, rows)
    batch = max(1, rows // queries)
    heads = min(16, batch) if kind == "heads" else 1
    return (batch // heads, heads, queries, keys)


@jax.jit
def _forward(x, hide):
    logits = jnp.where(hide, -jnp.inf, x.astype(jnp.float32) * SCALE)
    return jax.nn.softmax(logits)


@jax.jit
def _backward(dy, y, hide):
    dy, y = (jnp.where(hide, 0, a.astype(jnp.float32)) for a in (dy, y))
    return SCALE * y * (dy - (y * dy).sum(-1, keepdims=True))


class RawRun:
    """A case's arrays on the GPU, in so many sets, and launches of them without XLA in between."""

    def __init__(self, case: Case, sets: int = 2):
        self.case = case
        self._size = math.prod(case.shape)
        masks = []
        if case.masked:
            hidden = numbers("mask", math.prod(case.mask_shape), "float32") < -0.5
            masks = [jax.block_until_ready(hidden)]
        self._sets = [
            [*(self._numbers(f"operand {o} of {s}") for o in range(case.operands)), *masks]
            for s in range(sets)
        ]
        self._results = [self._numbers(f"result {s}") for s in range(sets)]

    def _numbers(self, role: str) -> jax.Array:
        return numbers(role, self._size, self.case.dtype)

    def calls(self, device: Device, plan: Plan, cubins: list[bytes]) -> list[Call]:
        """The launches on the first set, then those on the next."""
        case = self.case
        if case.direction == "forward":
            params = softmax.forward_params(case.shape, SCALE, case.diagonal, case.digits)
        else:
            params = softmax.backward_params(case.shape, SCALE, case.diagonal)
        found = []
        for arrays, result in zip(self._sets, self._results, strict=True):
            lists, parts = [[*arrays, result]], []
            if plan.workspace is not None:
                parts = [jnp.zeros(plan.workspace, jnp.float32)]
                lists = [[*arrays, *parts], [*arrays, *parts, result]]
            if plan.workspace is not None and len(plan.launches) == 1:
                lists = [[*arrays, result, *parts]]
            found += [
                Call(device, launch, cubin, operands, [params], parts if launch.zeroed else ())
                for launch, cubin, operands in zip(plan.launches, cubins, lists, strict=True)
            ]
        return found

    @cached_property
    def _some_rows(self) -> np.ndarray:
        rows = math.prod(self.case.shape[:-1])
        few = max(1, min(rows, 2**22 // self.case.shape[-1]))
        return np.unique(np.linspace(0, rows - 1, few).astype(np.int64))

    @cached_property
    def _wanted(self) -> jax.Array:
        case, rows = self.case, self._some_rows
        keys = case.shape[-1]
        hide = jnp.zeros((1, 1), bool)
        if case.kind == "causal":
            hide = jnp.arange(keys) > jnp.asarray(rows % case.shape[-2])[:, None]
        first = [self._rows(a) for a in self._sets[0][: case.operands]]
        if not case.masked:
            return (_forward if case.operands == 1 else _backward)(*first, hide)
        mask = self._sets[0][1][: math.prod(case.mask_shape)].reshape(case.mask_shape)
        return _forward(*first, jnp.broadcast_to(mask, case.shape).reshape(-1, keys)[rows])

    def error(self) -> float:
        """Of some rows of the first set's result, against float32, to the largest number."""
        # A copy: the launches wrote behind JAX's back.
        got = self._rows(jnp.array(self._results[0]))
        wrong = jnp.abs(got.astype(jnp.float32) - self._wanted).max()
        return float(wrong / jnp.abs(self._wanted).max())

    def _rows(self, array: jax.Array) -> jax.Array:
        return array[: self._size].reshape(-1, self.case.shape[-1])[self._some_rows]

    def poison(self, device: Device) -> None:
        for result in self._results:
            device.poison(result)
