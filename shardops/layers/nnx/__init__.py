"""Flax NNX modules on the functions of `shardops.layers`.

Parameters have the names and shapes of Flax's own layers (`kernel`, `bias`, `scale`), and logical
axes as Flax's metadata (`out_sharding`). `rules=`, or those of `nnx.logical_axis_rules` when a
module is made, say where they lie on the mesh, and where activations go.
"""

try:
    import flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardops.layers.nnx: flax is not installed; expected flax 0.12 or newer. "
        "pip install 'shardops[flax]'."
    ) from error

from shardops.layers.nnx.basic import Dense, LayerNorm, RMSNorm, Softmax
from shardops.layers.nnx.joined import LayerNormDense, LayerNormMLP
from shardops.layers.nnx.parameters import QuantizerState, watch
from shardops.layers.nnx.replacing import with_shardops
from shardops.layers.nnx.transformer import MultiHeadAttention, TransformerLayer

__all__ = [
    "Dense",
    "LayerNorm",
    "LayerNormDense",
    "LayerNormMLP",
    "MultiHeadAttention",
    "QuantizerState",
    "RMSNorm",
    "Softmax",
    "TransformerLayer",
    "watch",
    "with_shardops",
]
