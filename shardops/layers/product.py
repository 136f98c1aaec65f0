"""Products of layers: what comes before the activation is a value with a name.

The activation is computed apart from its product: policies of `jax.checkpoint` can then save the
pre-activation alone, and the activation follows from it without the product.
"""

from dataclasses import replace

import jax

from shardops import array_type
from shardops.checkpoint_policies import GEMM
from shardops.layers.activations import activate
from shardops.layers.names import named
from shardops.primitives import check
from shardops.primitives import gemm as gemms
from shardops.primitives.gemm import OutSharding
from shardops.primitives.gemm_op import GemmOp


def product(
    op: GemmOp, lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None, out_sharding: OutSharding
) -> jax.Array:
    """activation(lhs · rhs + bias), with its derivative."""
    pre = gemms.product(replace(op, activation=None), lhs, rhs, bias, None, out_sharding)
    return activated(op, pre, out_sharding)


def activated(op: GemmOp, pre: jax.Array, out_sharding: OutSharding) -> jax.Array:
    """The activation of a pre-activation, which gets its name and, on Auto axes, its sharding."""
    return activate(op.activation, named(as_asked(op.name, pre, out_sharding), GEMM))


def as_asked(op: str, value: jax.Array, out_sharding: OutSharding) -> jax.Array:
    """A value with the sharding that was asked for, and its cotangent with it: Auto axes know of
    neither."""
    mesh = array_type.mesh_of(value)
    wanted = check.out_sharding(op, out_sharding, value.shape, mesh)
    if wanted is None or not mesh.auto_axes:
        return value
    return array_type.constrain(value, wanted, check.open_dims(out_sharding))
