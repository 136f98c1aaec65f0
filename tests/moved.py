"""What a function moves between devices: the collectives of its compiled program.

In float32: the CPU compiler widens the collectives of bfloat16.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardops import hlo
from tests import meshes

# In proportions of models: neither the tokens of a group nor the weight are cheap to move.
B, S, K, N = 8, 64, 384, 320  # x [B, S, K], w [K, N], y [B, S, N]
DP, TP = meshes.SIZES["dp"], meshes.SIZES["tp"]
SHAPES = {
    "x": (B, S, K),
    "w": (K, N),
    "vector": (N,),
    "y": (B, S, N),
    "residual": (B, S, N),
    "x_long": (B, S, 4 * K),
    "w_long": (4 * K, N),
    "x_many": (B, 4 * S, K),
    "y_many": (B, 4 * S, N),
}

Moved = tuple[dict[str, tuple[int, int]], tuple[int, ...]]


def size(*dims: int) -> int:
    """Bytes of a float32 array."""
    return 4 * math.prod(dims)


def moved(
    mesh: Mesh, f: Callable, layouts: Mapping[str, tuple], out=None, *, attributed: bool = True
) -> Moved:
    """{kind: (count, bytes)} and the sizes of the groups, sorted.

    Args:
      f: takes an array for each of `layouts`, whose keys name its shape.
      out: layouts of the results, a tuple or a list of them: what an Auto mesh is told. On Explicit
        axes the types say it.
      attributed: every collective has to name the op of shardops that asked for it.
    """
    placed = [meshes.place(mesh, jnp.ones(SHAPES[n]), *spec) for n, spec in layouts.items()]
    options = {}
    if out is not None and not meshes.explicit_axes(mesh):
        options["out_shardings"] = jax.tree.map(
            lambda spec: NamedSharding(mesh, P(*spec)), out, is_leaf=lambda t: isinstance(t, tuple)
        )
    found = hlo.collectives(jax.jit(f, **options).lower(*placed).compile())
    strangers = [c for c in found if not hlo.asked_by(c).startswith("shardops.")]
    assert not (attributed and strangers), f"not asked for by shardops: {strangers}"
    return hlo.summary(found), tuple(sorted(c.groups for c in found))


def wanted(mesh: Mesh, *spec) -> P | None:
    """out_sharding= where a type can say it; under Auto the result's own sharding says it."""
    return meshes.explicit_part(mesh, spec) if meshes.explicit_axes(mesh) else None
