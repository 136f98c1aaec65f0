"""Checks of what modules are made and called with: errors name module, argument, value and fix."""

from collections.abc import Mapping, Sequence
from sys import float_info
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardops.errors import shown, wrong
from shardops.primitives import check
from shardops.primitives.scaling import FLOATS


def integer(op: str, argument: str, value: Any) -> int:
    """A Python int: sizes and dims are static."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        got = shown(value) if isinstance(value, float | bool | str) else f"a {type(value).__name__}"
        raise TypeError(wrong(op, argument, got, "an int", "It is static: pass a Python int."))
    return int(value)


def count(op: str, argument: str, value: Any) -> int:
    """How many features or heads."""
    size = integer(op, argument, value)
    if size < 1:
        raise ValueError(wrong(op, argument, shown(value), "at least 1", "Give it one at least."))
    return size


def counts(op: str, argument: str, value: Any) -> tuple[int, ...]:
    """One count, or several."""
    several = value if isinstance(value, tuple | list) else (value,)
    return tuple(count(op, argument, size) for size in several)


def dims(op: str, argument: str, value: Any) -> tuple[int, ...]:
    """One dim, or several."""
    several = value if isinstance(value, tuple | list) else (value,)
    return tuple(integer(op, argument, dim) for dim in several)


def positive(op: str, argument: str, value: Any, fix: str) -> None:
    """A finite number above 0."""
    number = not isinstance(value, bool) and isinstance(value, int | float | np.number)
    plain = value.item() if isinstance(value, np.number) else value
    if not number or not 0 < plain <= float_info.max:
        error = ValueError if number else TypeError
        raise error(wrong(op, argument, shown(value), "a positive number", fix))


def dtypes(op: str, dtype: Any, param_dtype: Any = jnp.float32) -> None:
    """Floats that the ops have; `dtype` may be None."""
    for argument, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value is None and argument == "dtype":
            continue
        name = "None" if value is None else check.dtype_name(value)
        if name not in FLOATS:
            fix = "Operands of other dtypes are a recipe's (recipe=)."
            raise TypeError(wrong(op, argument, name, " | ".join(FLOATS), fix))


def array(op: str, argument: str, value: Any, want: str = "[..., features]") -> Any:
    """An array of at least one dim."""
    if not isinstance(value, jax.Array | np.ndarray):
        got, fix = f"a {type(value).__name__}", "Convert it with jnp.asarray."
        raise TypeError(wrong(op, argument, got, "an array", fix))
    if value.ndim == 0:
        raise ValueError(wrong(op, argument, "of shape ()", want, "Give it a last dim."))
    return value


def names(op: str, argument: str, value: Any, rank: int) -> tuple[str | None, ...] | None:
    """Logical axes of an array, one a dim."""
    if value is None:
        return None
    fix = "Give each dim a name or None."
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(wrong(op, argument, shown(value), "a tuple of names", fix))
    if len(value) != rank:
        raise ValueError(wrong(op, argument, shown(tuple(value)), f"{rank} entries", fix))
    return tuple(value)


def rules(value: Any) -> tuple[tuple[str, Any], ...]:
    """Rules for logical axes, hashable."""
    if isinstance(value, Mapping):
        fix = "Their order counts: pass tuple(rules.items())."
        raise TypeError(wrong("layers", "rules", "a mapping", _PAIRS, fix))
    if isinstance(value, str) or not isinstance(value, Sequence):
        fix = "Take those of shardops.layers.presets, or write pairs."
        raise TypeError(wrong("layers", "rules", shown(value), _PAIRS, fix))
    return tuple(_rule(rule) for rule in value)


_PAIRS = "pairs (name, axis of the mesh | tuple of axes | None)"


def _rule(rule: Any) -> tuple[str, Any]:
    if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str):
        name, axes = rule
        if axes is None or isinstance(axes, str):
            return name, axes
        if isinstance(axes, tuple | list) and all(isinstance(axis, str) for axis in axes):
            return name, tuple(axes)
    fix = "Take those of shardops.layers.presets, or write pairs."
    raise TypeError(wrong("layers", "rules", f"made of {shown(rule)}", _PAIRS, fix))
