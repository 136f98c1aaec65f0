"""How an op is seen in a traced program: while `fuse` traces, each call is a jit with a name.

An op is a `custom_vjp` whose statics are in closures, where nobody finds them. While marks are on,
a call of it is wrapped in a `jit` whose name stands for op, statics and types in a table here. All
of JAX's transformations know a jit; one that has changed the types has left something else than the
op, and it is not recognised. A mark that nobody looks for is a call like any other.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

# Part of JAX's own cache keys: functions that were traced before are traced anew with marks.
_on = jax.make_user_context(False)


@dataclass(frozen=True)
class Mark:
    """One call of an op: `function(op, static, *operands)`."""

    function: Callable[..., Any]
    op: Any  # the op's statics, such as NormForward or GemmOp
    static: Any  # the function's other static argument
    operands: tuple[Any, ...]  # types; None where an operand is left out


_names: dict[Mark, str] = {}
_marks: dict[str, Mark] = {}
_results: dict[str, tuple[Any, ...]] = {}
_jitted: dict[str, Callable[..., Any]] = {}


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Mark the ops that are traced in the block."""
    with _on(True):
        yield


def markable(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(op, static, *operands)`, to be found by `fuse`; outside of it, as it is."""

    def call(op: Any, static: Any, *operands: Any) -> Any:
        if not _on.value:
            return function(op, static, *operands)
        types = tuple(None if a is None else jax.typeof(a) for a in operands)
        name = _name(Mark(function, op, static, types))
        results = _jitted[name](*operands)
        _results[name] = tuple(map(jax.typeof, jax.tree.leaves(results)))
        return results

    return call


def _name(mark: Mark) -> str:
    if mark not in _names:
        name = f"{mark.op.scope}.{len(_names)}"

        def marked(*operands: Any) -> Any:
            return mark.function(mark.op, mark.static, *operands)

        marked.__name__ = marked.__qualname__ = name
        _jitted[name] = jax.jit(marked)
        _marks[name] = mark
        _names[mark] = name
    return _names[mark]


def marked(eqn: Any) -> str | None:
    """The mark's name, where the equation is a marked call or what a transformation made of it."""
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    return name if name in _marks else None


def recognised(eqn: Any) -> Mark | None:
    """The call of an op that the equation is; None where it is none, or no longer just that."""
    name = marked(eqn)
    if name is None:
        return None
    mark = _marks[name]
    given = [t for t in mark.operands if t is not None]
    same = [v.aval for v in eqn.invars] == given
    return mark if same and [v.aval for v in eqn.outvars] == [*_results.get(name, ())] else None
