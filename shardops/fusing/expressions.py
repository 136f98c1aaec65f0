"""Which activation some equations compute: expressions of one variable, compared as a whole.

An activation is what JAX traces `jax.nn.gelu`, `silu` or `relu` to on this version, in whatever way
its jits are inlined. A `custom_jvp` counts: `maximum(z, 0)` has another derivative than `relu`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "exact gelu": partial(jax.nn.gelu, approximate=False),
    "maximum(z, 0), whose derivative at 0 is not that of relu": lambda z: jnp.maximum(z, 0),
}
_COMMUTATIVE = ("add", "mul", "max", "min")
_LIMIT = 64  # equations of one expression


class Expressions:
    """Numbers expressions, equal ones alike, so that comparing costs nothing."""

    def __init__(self, argument: Any) -> None:
        self._numbers: dict[Any, int] = {}
        self._constants: dict[int, Any] = {}
        self._inside = False  # of a derivative
        self.argument = self._number("z")
        self.activations: dict[int, str] = {}
        for name, function in ACTIVATIONS.items():
            results = self.of_jaxpr(jax.make_jaxpr(function)(argument), [self.argument])
            if results:
                self.activations[results[0]] = name

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of_jaxpr(self, jaxpr: Any, arguments: Sequence[int]) -> list[int] | None:
        """Expressions of a jaxpr's results, given those of its arguments."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        if inner.constvars or len(inner.eqns) > _LIMIT:
            return None
        known = dict(zip(inner.invars, arguments, strict=True))
        for eqn in inner.eqns:
            results = self.of_equation(eqn, known)
            if results is None:
                return None
            known.update(zip(eqn.outvars, results, strict=True))
        results = [self._atom(v, known) for v in inner.outvars]
        return None if None in results else [r for r in results if r is not None]

    def of_equation(self, eqn: Any, known: dict[Any, int]) -> list[int] | None:
        """Expressions of an equation's results; None where it reads what is not known."""
        read = [self._atom(v, known) for v in eqn.invars]
        if None in read or eqn.effects:
            return None
        operands = [r for r in read if r is not None]
        name, params = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit"):
            return self.of_jaxpr(params["jaxpr"], operands)
        if name == "custom_jvp_call":
            return self._with_derivative(eqn, operands)
        if len(eqn.outvars) != 1:
            return None
        # A constant may be written in another dtype, and be cast and made to vary where it is used.
        if name in ("pvary", "copy"):
            return operands
        if name == "convert_element_type" and operands[0] in self._constants:
            return [self._constant(self._constants[operands[0]], params["new_dtype"])]
        if name in _COMMUTATIVE:
            operands.sort()
        shown = repr(sorted((k, v) for k, v in params.items() if k != "sharding"))
        return [self._number((name, shown, *operands))]

    def _with_derivative(self, eqn: Any, operands: list[int]) -> list[int] | None:
        """A function of one variable with a derivative of its own counts with that derivative.

        With its own value too: the one in the rule may be another function's.
        """
        if self._inside:  # the value in a derivative is most often the function itself again
            return self.of_jaxpr(eqn.params["call_jaxpr"], operands)
        if len(operands) != 1 or len(eqn.outvars) != 1:
            return None

        def function(z: Any) -> Any:
            params = eqn.primitive.get_bind_params(eqn.params)
            return eqn.primitive.bind(z, **params)[0]

        def tangent(z: Any, dz: Any) -> Any:
            return jax.jvp(function, (z,), (dz,))

        aval = eqn.invars[0].aval
        jaxpr = jax.make_jaxpr(tangent)(aval, aval)
        self._inside = True
        value = self.of_jaxpr(eqn.params["call_jaxpr"], operands)
        both = self.of_jaxpr(jaxpr, [*operands, self._number("dz")])
        self._inside = False
        if value is None or both is None:
            return None
        return [self._number((eqn.primitive.name, *value, *both))]

    def _atom(self, atom: Any, known: dict[Any, int]) -> int | None:
        if isinstance(atom, Literal):
            dtype = getattr(atom.aval, "dtype", None)
            scalar = dtype is not None and np.ndim(atom.val) == 0
            return self._constant(atom.val, dtype) if scalar else None
        return known.get(atom)

    def _constant(self, value: Any, dtype: Any) -> int:
        cast = np.asarray(value).astype(dtype)
        number = self._number(("constant", str(dtype), cast.tobytes()))
        self._constants[number] = cast
        return number
