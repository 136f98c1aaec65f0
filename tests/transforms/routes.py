"""The routes of the matrix: a mesh, operands on it, and the op as a function of them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from tests.transforms.subjects import Subject

Function = Callable[..., jax.Array]


@dataclass(frozen=True)
class Route:
    """`kind`: of the mesh, None without one; `manual`: the axes that a shard_map maps."""

    name: str
    kind: str | None = None
    manual: tuple[str, ...] = ()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Mesh | None]:
        if self.kind is None:
            yield None
            return
        with meshes.entered(self.kind) as mesh:
            yield mesh

    def placed(self, mesh: Mesh | None, subject: Subject) -> list[jax.Array]:
        """The operands, on the mesh."""
        arrays = subject.operands()
        if mesh is None:
            return [jnp.asarray(a) for a in arrays]
        layouts = subject.mapped if self.manual else subject.layouts
        return [
            jax.device_put(a, NamedSharding(mesh, P(*layout)))
            for a, layout in zip(arrays, layouts, strict=False)
        ]

    def function(self, subject: Subject) -> Function:
        """The op on this route."""
        return _mapped(subject.call, subject.mapped, self.manual) if self.manual else subject.call

    def nested(self, subject: Subject) -> Function:
        """The same with a shard_map more around it, or inside the one that there is."""
        if not self.manual:
            return _mapped(subject.call, subject.layouts, ("dp",))
        inner = _mapped(subject.call, subject.mapped, ("tp",))
        return _mapped(inner, subject.mapped, ("dp",))


def _mapped(function: Function, layouts: tuple, axes: tuple[str, ...]) -> Function:
    *ins, out = (meshes.only(layout, *axes) for layout in layouts)
    return jax.shard_map(function, in_specs=tuple(ins), out_specs=out, axis_names=set(axes))


ROUTES = (
    Route("none"),
    Route("Auto", "auto"),
    Route("Explicit", "explicit"),
    Route("mixed", "explicit-auto"),
    Route("shard_map", "auto", ("dp", "tp")),
    Route("partly manual, Auto", "auto", ("dp",)),
    Route("partly manual, Explicit", "explicit", ("dp",)),
)
