"""Layers: functions of arrays here, Flax modules in `shardops.layers.nnx` and `.linen`."""

from shardops.layers.dense import dense
from shardops.layers.mlp import layer_norm_mlp
from shardops.layers.norm_dense import layer_norm_dense

__all__ = ["dense", "layer_norm_dense", "layer_norm_mlp"]
