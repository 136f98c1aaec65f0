"""What an op tells the router: how it lies on a mesh, what one device does, how it batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer

from shardops.rules.spec import Axes, AxisSizes, Spec
from shardops.rules.step import Step

Arrays = Sequence[jax.Array]
Shapes = tuple[tuple[int, ...], ...]
Wanted = tuple[Spec | None, ...]  # the sharding wanted of each result, where it is known
Itemsizes = tuple[int, ...]  # bytes of an element of each operand


@dataclass(frozen=True)
class Call:
    """What is known of a call when it is placed on a mesh."""

    shapes: Shapes
    specs: tuple[Spec, ...]  # where the operands are offered
    sizes: AxisSizes
    wanted: Wanted
    itemsizes: Itemsizes

    def want(self, result: int = 0) -> Spec | None:
        """The sharding wanted of a result; None where it is not known."""
        return self.wanted[result] if result < len(self.wanted) else None


@dataclass(frozen=True)
class Placement:
    """Where operands and results of one call lie, and the plan that says so."""

    operands: tuple[Spec, ...]  # when the local share begins
    results: tuple[Spec, ...]
    plan: Any
    steps: tuple[Step, ...] = ()  # of the local share: its sums over the mesh, moves of its results
    moves: tuple[Step, ...] = ()  # of the operands, from where they are taken: the router's
    unreduced: tuple[Axes, ...] = ()  # of each result: axes over which its sum is still to come
    taken: tuple[Spec, ...] = ()  # where the operands are when the mapped function begins


class Op(Protocol):
    """An op with its statics, hashable. Arrays are its operands; `None` operands are left out."""

    @property
    def scope(self) -> str:
        """Its name in profiles and in HLO."""
        ...

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        ...

    @property
    def kernel(self) -> bool:
        """Whether it runs as a kernel where the platform has one."""
        ...

    def place(self, call: Call) -> Placement:
        """Plan from what is offered and wanted. Pure."""
        ...

    def local(self, plan: Any, arrays: Arrays, inner: "Inner") -> tuple[jax.Array, ...]:
        """One device's share, with the plan's collectives; a plan of None has none.

        Work on the device goes through `inner`, which knows about axes that are still Auto.
        """
        ...

    def factors(self, shapes: Shapes) -> tuple[list[list[str]], list[list[str]]]:
        """Shardy's factor names of each dim of operands and results."""
        ...

    def vmapped(
        self, size: int, batched: Sequence[bool], arrays: Arrays, wanted: Wanted
    ) -> tuple[jax.Array, ...]:
        """The op on operands of which some have a new first dim; so do all results."""
        ...


Inner = Callable[..., tuple[jax.Array, ...]]  # (op, *arrays) -> results


def bare(op: Op, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The local op with no mesh in sight."""
    return op.local(None, arrays, bare)


def with_new_dim(
    size: int, batched: Sequence[bool], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """For a vmap rule: the arrays that lack the new first dim repeated along it."""
    return [
        a if b else jnp.broadcast_to(a, (size, *a.shape))
        for a, b in zip(arrays, batched, strict=True)
    ]


class Differentiable(Protocol):
    """A function that waits for its derivative."""

    def __call__(self, *arguments: Any) -> Any: ...

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None: ...


def with_derivative(function: Callable[..., Any]) -> Differentiable:
    """`jax.custom_vjp` of a function whose first two arguments are its statics."""
    differentiable: Any = jax.custom_vjp(function, nondiff_argnums=(0, 1))
    return differentiable


def found_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(*statics, *arrays)` where an eager call costs little Python.

    Called on arrays that are there, it is one program, looked up by its statics: what checks and
    plans runs while that is traced. Traced, or with statics that are not hashable, it is the
    function itself.

    Returns: `call(key, statics, *arrays)`; `key` stands for the statics, and tells apart those that
      are equal and differ in type. The simpler it is, the less a call takes.
    """
    # Not an lru_cache: one that minds types takes as long as the rest of the call.
    programs: dict[Any, Callable[..., Any]] = {}

    def call(key: Any, statics: tuple[Any, ...], *arrays: Any) -> Any:
        for array in arrays:
            if type(array) not in _HERE and not _is_here(array):
                return function(*statics, *arrays)
        try:
            run = programs.get(key)
        except TypeError:
            return function(*statics, *arrays)
        if run is None:
            if len(programs) >= _MOST_PROGRAMS:
                programs.clear()
            run = programs[key] = jax.jit(partial(function, *statics), inline=True)
        return run(*arrays)

    return call


_MOST_PROGRAMS = 1024
_HERE: set[type] = {type(None)}  # types that `_is_here` knows: asking JAX takes a microsecond


def _is_here(array: Any) -> bool:
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return False
    _HERE.add(type(array))
    return True


def compiled(function: Callable[..., Any]) -> Any:
    """`function` as one program where it is called eagerly; inlined where it is traced."""
    return jax.jit(function, static_argnums=(0, 1), inline=True)
