"""`explain`: trace and compile a function, and report what its ops move."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from shardops import hlo
from shardops.errors import shown, wrong
from shardops.explaining.program import in_program
from shardops.explaining.report import Entry, Report, entries_of
from shardops.explaining.timing import link_named
from shardops.primitives import check
from shardops.recording import recording
from shardops.rules.hardware import DEFAULT

FEW = 64  # ops up to which plain XLA is asked unless told otherwise

_ONCE = "an op in the body of a loop is listed once, however often the loop runs"
_CUT = "plain XLA: an all-reduce of which each device keeps a slice counts as a reduce-scatter"
_WIDE = "the compiler for CPUs widens collectives of 16-bit arrays, to twice the bytes of the plan"
_BOTH = (
    "on a mesh of Explicit and Auto axes an op is listed for each of them; on Auto axes the shapes "
    "are those of a shard over the Explicit ones"
)
_LOCAL = (
    "an op inside shard_map, over axes that are all mapped there, runs on the shard that it is "
    "given and moves nothing: it is not listed"
)


def explain(
    fn: Callable[..., Any], *, link: str = DEFAULT.name, compare: bool | None = None
) -> Callable[..., Report]:
    """Report what each shardops op of a function moves between devices, and why.

        print(so.explain(fn)(*args))

    The function is traced and compiled, not run; a gradient's backward ops are in the report too.
    On Explicit axes an op's layouts are those of the types, on Auto axes those that the partitioner
    chose; on one device ops are listed too, and move nothing. Suggestions count one forward product
    alone: not its gradient, nor what uses the result. Not listed: the way back of the cotangent of
    `add`, where that lies elsewhere than the result.

    Args:
      fn: a function or a jitted one.
      link: what joins the devices, for predicted times: a name of `rules.hardware.LINKS`.
      compare: whether plain XLA is asked what it would move, a small compile for each different
        product. None: where there are at most 64 ops.
    Returns: a function of fn's arguments (arrays, or ShapeDtypeStructs with shardings) that returns
      a Report: `str`, `rich.print`, `.to_html()`, `.to_dict()`.
    Raises: TypeError for what is no function; ValueError for another link or another `compare`;
      what tracing and compiling `fn` raises.
    """
    if not callable(fn):
        fix = "Pass the function, not its result."
        raise TypeError(wrong("explain", "fn", shown(fn), "a function", fix))
    check.one_of("explain", "compare", compare, (True, False, None))
    joined = link_named(link)
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)

    def explained(*args: Any, **kwargs: Any) -> Report:
        with recording() as records, _without_cached_programs():
            traced = jitted.trace(*args, **kwargs)
            compiled = traced.lower().compile()
        found = in_program(records, traced.jaxpr.jaxpr)
        asked = len(found) <= FEW if compare is None else compare
        entries = tuple(e for r in found for e in entries_of(r, joined, compare=asked))
        return Report(entries, joined, hlo.collectives(compiled), tuple(_notes(entries)))

    return explained


def _notes(entries: Sequence[Entry]) -> Iterator[str]:
    if not entries:
        yield "the program has no shardops op outside of shard_map"
    yield _ONCE
    yield _LOCAL
    if {e.record.route for e in entries} >= {"auto", "explicit"}:
        yield _BOTH
    if any(e.plain for e in entries):
        yield _CUT
    dtypes = {d for e in entries if e.record.route != "alone" for d in e.record.dtypes}
    if jax.default_backend() == "cpu" and any(jnp.dtype(d).itemsize == 2 for d in dtypes):
        yield _WIDE


@contextlib.contextmanager
def _without_cached_programs() -> Iterator[None]:
    """A program from the persistent cache is not partitioned again, and so says nothing."""
    settings: Any = jax.config  # its options are attributes that no type names
    if not (settings.jax_compilation_cache_dir and settings.jax_enable_compilation_cache):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # whether a cache is used is asked once, and again after this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        reset_cache()
