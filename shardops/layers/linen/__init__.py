"""Flax Linen modules on the functions of `shardops.layers`.

Parameters have the names and shapes of Flax's own layers (`kernel`, `bias`, `scale`), and logical
axes as Flax's metadata (`nn.with_logical_partitioning`). `rules=`, or those of
`nn.logical_axis_rules`, say where they lie on the mesh, and where activations go.
"""

try:
    import flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardops.layers.linen: flax is not installed; expected flax 0.12 or newer. "
        "pip install 'shardops[flax]'."
    ) from error

from shardops.layers.linen.basic import Dense, LayerNorm, RMSNorm, Softmax
from shardops.layers.linen.dot_general import DotGeneral, Einsum
from shardops.layers.linen.joined import LayerNormDense, LayerNormMLP
from shardops.layers.linen.replacing import with_shardops
from shardops.layers.linen.transformer import MultiHeadAttention, TransformerLayer
from shardops.layers.linen.watching import watch

__all__ = [
    "Dense",
    "DotGeneral",
    "Einsum",
    "LayerNorm",
    "LayerNormDense",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RMSNorm",
    "Softmax",
    "TransformerLayer",
    "watch",
    "with_shardops",
]
