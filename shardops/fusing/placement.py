"""Whether a product's result goes on after the product, read off the types of its operands."""

import jax

from shardops.fusing.marking import Mark
from shardops.placing import placed
from shardops.rules.spec import only, to_spec


def result_moves(mark: Mark) -> bool:
    """Whether the plan of a marked product moves its result after the last sum, slices included.

    As far as types say it: of the layouts on Auto axes they say nothing.
    """
    operands = [t for t in mark.operands if t is not None]
    meshes = (t.sharding.mesh for t in operands)
    mesh = next((m for m in meshes if not m.empty), jax.sharding.get_abstract_mesh())
    axes = tuple(a for a in mesh.explicit_axes if mesh.shape[a] > 1)
    if not axes:
        return False
    placement = placed(
        mark.op,
        tuple(t.shape for t in operands),
        tuple(only(to_spec(t.sharding.spec, t.ndim), axes) for t in operands),
        tuple((a, mesh.shape[a]) for a in axes),
        (None if mark.static is None else only(mark.static, axes),),
        tuple(t.dtype.itemsize for t in operands),
    )
    return bool(placement.plan.after_finish)
