"""`fuse`: what one op can do in place of several, found in model code and done."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from shardops.errors import wrong
from shardops.fusing.marking import marking
from shardops.fusing.program import Program
from shardops.fusing.report import Report

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def fuse(fn: Callable[..., Any]) -> "Fused":
    """Fuse what stands around ops of shardops in a function: sums, residual branches and more.

        s = x + a; y = norm(s); ... s ...        y, s = norm(x, add=a, return_input=True)
        y = norm(x); ... x ...                   y, x = norm(x, return_input=True)
        quantize(norm(x), q)                     norm(x, quantizer=q)
        gelu(gemm(x, w) + bias)                  gemm(x, w, bias=bias, activation="gelu")

    The function is traced each time that it is called, as by a `jax.jit` around it, and what is
    found is exchanged for the op on the right. Nothing else changes: a function without any of
    these computes what it did, bit for bit. A fused sum has the bits that it had; an epilogue, a
    quantiser and a fused gradient do not round between the equations that they stand for.

    Arguments and results that are not JAX arrays are handed on as they are. Works under `jit`,
    `grad`, `vmap` and `shard_map`, and reaches into jits, `scan`, `while_loop`, `cond`,
    `checkpoint` and `shard_map` in the function. Ops under a `vmap` in the function, norms under a
    `grad` in it, and what functions with derivatives of their own do are left alone: fuse the
    function inside of these.

    Args:
      fn: a function of pytrees, a jitted one, a Flax module or its `apply`.
    Returns: a function of the same arguments. Its `.report` says what the last trace has fused, and
      what nearly; `.explain(*args)` says it without running anything, also of ShapeDtypeStructs.
    Raises: TypeError where fn is not callable, or returns what is neither an array nor a number, a
      string or None.
    Sharding: that of the ops. On Explicit axes no fusion moves more than the code did: an epilogue
      is where its product's result moves the least, and a sum of terms that are sharded in two ways
      is left alone. On Auto axes, where the partitioner alone has a product's result moved, an
      epilogue may cost a collective more.
    """
    if not callable(fn):
        fix = "Pass a function."
        raise TypeError(wrong("fuse", "fn", f"a {type(fn).__name__}", "a callable", fix))
    return Fused(fn)


class Fused:
    """A function with its fusions: call it as that function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._known: dict[Any, Program] = {}
        self._report: Report | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program, arrays, result = self._traced(args, kwargs)
        results = program(*arrays)
        self._report = program.report()
        return result(results)

    def __get__(self, instance: Any, owner: Any = None) -> "Fused | FusedMethod":
        return self if instance is None else FusedMethod(self, instance)

    @property
    def report(self) -> Report:
        """What the last trace has fused, and what nearly.

        Raises: ValueError before the first one.
        """
        if self._report is None:
            fix = "Call the function first, or ask `.explain(*args)`."
            raise ValueError(wrong("fuse", "report", "asked for", "a call before it", fix))
        return self._report

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """The report of a call with these arguments, which is traced and not run."""
        program, arrays, _ = self._traced(args, kwargs)
        jax.make_jaxpr(program)(*arrays)
        self._report = program.report()
        return self._report

    def _traced(self, args: Any, kwargs: Any) -> tuple[Program, list[Any], Callable[..., Any]]:
        """The program, its arguments, and what makes the function's result of the program's."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if _is_array(leaf)]
        returned: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            full = [*leaves]
            for n, array in zip(places, arrays, strict=True):
                full[n] = array
            args, kwargs = jax.tree.unflatten(tree, full)
            result = self._fn(*args, **kwargs)
            given, result_tree = jax.tree.flatten_with_path(result)
            results = [leaf for path, leaf in given if _checked(path, leaf)]
            # Of a result that is no array the function's own is kept; of others, that they are.
            returned[:] = [jax.Array if _is_array(leaf) else leaf for _, leaf in given], result_tree
            return results

        arrays = [leaves[n] for n in places]
        with marking():
            jaxpr = jax.make_jaxpr(flat)(*arrays)
        rest, result_tree = returned

        def result(results: Any) -> Any:
            values = iter(results)
            full = [next(values) if leaf is jax.Array else leaf for leaf in rest]
            return jax.tree.unflatten(result_tree, full)

        return Program(jaxpr, self._known), arrays, result


class FusedMethod:
    """A fused function as a method of an object: what was fused belongs to the function."""

    def __init__(self, fused: Fused, instance: Any) -> None:
        functools.update_wrapper(self, fused, updated=())
        self.__func__, self.__self__ = fused, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Each access makes one; JAX must know that it has traced it before."""
        if not isinstance(other, FusedMethod):
            return NotImplemented
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    @property
    def report(self) -> Report:
        """What the last trace has fused, of any object."""
        return self.__func__.report

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """The report of a call with these arguments, which is traced and not run."""
        return self.__func__.explain(self.__self__, *args, **kwargs)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _checked(path: Any, leaf: Any) -> bool:
    """Whether a result is a JAX array. Refuses what may hide one."""
    if _is_array(leaf):
        return True
    if not isinstance(leaf, _PLAIN) and not hasattr(leaf, "dtype"):
        name = f"the result{jax.tree_util.keystr(path)}"
        want = "arrays, numbers, strings or None"
        fix = "Register its class as a pytree, or return what it holds."
        raise TypeError(wrong("fuse", name, f"a {type(leaf).__name__}", want, fix))
    return False
