"""Layouts, sizes and steps in words."""

from collections.abc import Sequence

from shardops.explaining.names import Array, Dims, Names
from shardops.rules.spec import Axes, Spec
from shardops.rules.step import Step

COLLECTIVES = {
    "slice": "slice",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
    "psum": "all-reduce",
    "psum_scatter": "reduce-scatter",
}


def axes(names: Axes) -> str:
    """dp+tp."""
    return "+".join(names)


def verb(names: Axes, stem: str) -> str:
    """tp shards; dp+tp shard."""
    return stem if len(names) > 1 else f"{stem}s"


def listed(items: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def layout(dims: Dims, spec: Spec) -> str:
    """b@dp, s@tp; "whole" where nothing is sharded."""
    cut = [f"{d}@{axes(s)}" for d, s in zip(dims, spec, strict=True) if s]
    return ", ".join(cut) or "whole"


def typed(array: Array, dtype: str, shape: Sequence[int], spec: Spec) -> str:
    """bfloat16[b 8@dp, s 512@tp, k 4096]."""
    dims = [
        f"{d} {n}" + (f"@{axes(s)}" if s else "")
        for d, n, s in zip(array.dims, shape, spec, strict=True)
    ]
    return f"{dtype}[{', '.join(dims)}]".lstrip()


def size(count: float) -> str:
    """A number of bytes: 12.6 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def operations(count: float) -> str:
    """A number of operations: 34.4 GFLOP."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} FLOP"


def time(microseconds: float) -> str:
    """A time: 28.0 µs."""
    return f"{_digits(microseconds / 1e3)} ms" if microseconds >= 1e3 else f"{microseconds:.1f} µs"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def step(one: Step, names: Names) -> str:
    """all-gather of rhs over dp along k."""
    array = names.called(one.array)
    text = f"{COLLECTIVES[one.kind]} of {array.name} over {axes(one.axes)}"
    if one.dim < 0:
        return text
    dim = dim_name(array, one.dim)
    if one.to_dim < 0:
        return f"{text} along {dim}"
    return f"{text} from {dim} to {dim_name(array, one.to_dim)}"


def dim_name(array: Array, dim: int) -> str:
    """The name of a dim; its number where the array is none of the call's."""
    return array.dims[dim] if 0 <= dim < len(array.dims) else f"dim {dim}"
