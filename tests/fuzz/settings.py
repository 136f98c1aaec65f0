"""Where a drawn case runs: mesh, axis types, what a shard_map maps; and drawn layouts."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Spec = tuple[tuple[str, ...], ...]
Draw = Callable[[st.SearchStrategy], Any]

ROUTES = ("auto", "explicit", "mixed", "shard_map", "partly manual")
MESHES = (
    {"a": 2, "b": 4},
    {"a": 2, "b": 2, "c": 2},
    {"a": 8},
    {"a": 1, "b": 8},
    {"a": 2, "b": 1, "c": 4},
    {"a": 4, "b": 2, "c": 1},
)
SIZES = (8, 4, 16, 2, 1, 3, 6, 12)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A mesh, and a route over it. `manual` axes are mapped by a shard_map around the op."""

    route: str
    sizes: tuple[tuple[str, int], ...]
    explicit: tuple[str, ...] = ()
    manual: tuple[str, ...] = ()
    check_vma: bool = True
    even: bool = False  # only layouts that cut arrays into equal parts

    def mesh(self) -> Mesh:
        types = [AxisType.Explicit if a in self.explicit else AxisType.Auto for a, _ in self.sizes]
        shape = tuple(n for _, n in self.sizes)
        devices = jax.devices()[: math.prod(shape)]
        names = tuple(a for a, _ in self.sizes)
        return jax.make_mesh(shape, names, axis_types=tuple(types), devices=devices)

    @property
    def free(self) -> tuple[str, ...]:
        """Axes that the op sees."""
        return tuple(a for a, _ in self.sizes if a not in self.manual)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """On a CPU XLA ends the process for a sum in bfloat16 in a region that is mapped in part,
        in plain JAX as well ("Invalid binary instruction opcode copy")."""
        in_part = self.route in ("mixed", "partly manual")
        return ("float32", "float16") if in_part else ("float32", "bfloat16", "float16")

    @property
    def uneven(self) -> bool:
        """Whether an array may be cut into unequal parts: types and shard_map allow none."""
        return self.route == "auto" and not self.even


@st.composite
def settings(draw: Draw, routes: Sequence[str] = ROUTES) -> Setting:
    route = draw(st.sampled_from(routes))
    several = route in ("mixed", "partly manual")
    sizes = draw(st.sampled_from([m for m in MESHES if len(m) > several]))
    names = tuple(sizes)
    explicit: tuple[str, ...] = ()
    manual: tuple[str, ...] = ()
    if route in ("explicit", "shard_map"):
        explicit = draw(st.sampled_from([names, ()])) if route == "shard_map" else names
        manual = names if route == "shard_map" else ()
    elif route == "mixed":
        explicit = draw(proper_subset(names))
    elif route == "partly manual":
        # XLA refuses a sum over a mapped axis of one device where others are not mapped.
        manual = draw(proper_subset(names).filter(lambda some: all(sizes[a] > 1 for a in some)))
        explicit = draw(st.sampled_from([names, ()]))
    return Setting(
        route,
        tuple(sizes.items()),
        explicit=explicit,
        manual=manual,
        check_vma=not manual or draw(st.booleans()),
    )


def proper_subset(names: tuple[str, ...]) -> st.SearchStrategy:
    """Some of the axes, not all, in the order of the mesh."""
    chosen = range(1, 2 ** len(names) - 1)
    return st.sampled_from(
        [tuple(a for n, a in enumerate(names) if bits >> n & 1) for bits in chosen]
    )


def draw_spec(
    draw: Draw,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    axes: Sequence[str],
    *,
    uneven: bool = False,
    cut: Sequence[int] | None = None,
) -> Spec:
    """Each axis on a dim or on none, in any order; `cut`: the parts that dims are in already."""
    dims: list[tuple[str, ...]] = [() for _ in shape]
    parts = list(cut or [1] * len(shape))
    for axis in draw(st.permutations(axes)):
        # Of unequal parts none is empty: JAX refuses a dim that is shorter than its parts.
        cuts = [n * sizes[axis] for n in parts]
        open_ = [d for d, n in enumerate(shape) if n % cuts[d] == 0 or (uneven and n >= cuts[d])]
        at = draw(st.sampled_from([*open_, *open_, None]))
        if at is not None:
            parts[at] = cuts[at]
            dims[at] += (axis,)
    return tuple(dims)


def joined(manual: Spec, free: Spec) -> Spec:
    """Both, the manual axes as the major ones."""
    return tuple(m + f for m, f in zip(manual, free, strict=True))


def to_p(spec: Spec) -> P:
    return P(*(d if d else None for d in spec))


def divides(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    cuts = [math.prod(sizes[a] for a in d) for d in spec]
    return all(n % c == 0 for n, c in zip(shape, cuts, strict=True))


def put(setting: Setting, mesh: Mesh, array: np.ndarray, spec: Spec) -> jax.Array:
    """On the mesh: sharded by `spec` where that cuts it evenly, else whole."""
    even = divides(spec, array.shape, dict(setting.sizes))
    return jax.device_put(array, NamedSharding(mesh, to_p(spec) if even else P()))


def pinned(mesh: Mesh, array: jax.Array, spec: Spec) -> jax.Array:
    """Inside a program on Auto axes: sharded by `spec`, into unequal parts too.

    XLA fills up the last part with zeros, which would do no harm in a sum: they become ones. By
    their bits: to XLA on a CPU a subnormal float16 equals 0.
    """
    sharding = NamedSharding(mesh, to_p(spec))
    array = jax.lax.with_sharding_constraint(array, sharding)
    if array.dtype == bool:
        return array
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return jax.lax.with_sharding_constraint(jnp.where(bits == 0, 1, array), sharding)
