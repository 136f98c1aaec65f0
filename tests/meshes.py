"""Meshes of the tests, arrays placed on them, and random layouts."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_EXPLICIT, _AUTO = AxisType.Explicit, AxisType.Auto

# axis types, the last one repeated for further axes
KINDS = {
    "auto": (_AUTO, _AUTO),
    "explicit": (_EXPLICIT, _EXPLICIT),
    "explicit-auto": (_EXPLICIT, _AUTO),
    "auto-explicit": (_AUTO, _EXPLICIT),
}

SIZES = {"dp": 2, "tp": 4}


def make(kind: str = "auto", sizes: Mapping[str, int] = SIZES) -> Mesh:
    """A mesh over the first devices."""
    types = (KINDS[kind] + (KINDS[kind][-1],) * len(sizes))[: len(sizes)]
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


@contextlib.contextmanager
def entered(kind: str, sizes: Mapping[str, int] = SIZES) -> Iterator[Mesh]:
    """The mesh of `make`, as the ambient one."""
    mesh = make(kind, sizes)
    with jax.set_mesh(mesh):
        yield mesh


def place(mesh: Mesh, array: np.ndarray | jax.Array, *spec) -> jax.Array:
    """The array, sharded by `spec` over `mesh`."""
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def only(spec: Sequence, *axes: str) -> P:
    """What a spec says of some axes."""
    out = []
    for entry in spec:
        named = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        kept = tuple(a for a in named if a in axes)
        out.append(None if not kept else kept[0] if len(kept) == 1 else kept)
    return P(*out)


def explicit_part(mesh: Mesh, spec: Sequence) -> P:
    """What a type says of a spec: the Explicit axes alone."""
    return only(spec, *explicit_axes(mesh))


def explicit_axes(mesh: Mesh) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == _EXPLICIT)


def same(one: P, other: P) -> bool:
    """The same layout: trailing dims and size-one tuples may be written or not."""

    def plain(spec: P) -> tuple:
        entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
        while entries and not entries[-1]:
            entries.pop()
        return tuple(entries)

    return plain(one) == plain(other)


def random_spec(
    rng: np.random.Generator, shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    """Any layout that cuts `shape` into equal parts: each axis on a random dim, or on none."""
    dims: list[list[str]] = [[] for _ in shape]
    parts = [1] * len(shape)
    for axis in rng.permutation(list(sizes)):
        at = int(rng.integers(-1, len(shape)))
        if at >= 0 and shape[at] % (parts[at] * sizes[axis]) == 0:
            parts[at] *= sizes[axis]
            dims[at].append(str(axis))
    return tuple(tuple(d) for d in dims)


def shown(spec: Sequence[Sequence[str]]) -> str:
    """A layout as a short test id: dp,-,tp."""
    return ",".join("+".join(d) or "-" for d in spec)
