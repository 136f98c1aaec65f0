"""Sharding-aware GEMM, normalisation and softmax for JAX."""

from shardops import (
    checkpoint_policies,
    exporting,  # noqa: F401 for what it registers
    recipes,
    rules,
)
from shardops.config import use_kernels
from shardops.errors import KernelUnavailableError
from shardops.explaining import Report, explain
from shardops.fusing.fuse import fuse
from shardops.layers import dense, layer_norm_dense, layer_norm_mlp
from shardops.primitives.dot import dot_general
from shardops.primitives.gemm import gemm
from shardops.primitives.norm import layer_norm, rms_norm
from shardops.primitives.quantize import quantize
from shardops.primitives.scaled import ScaledArray, ScalingMode
from shardops.primitives.softmax import softmax
from shardops.quantizer import DenseQuantizers, Quantizer
from shardops.version import __version__

__all__ = [
    "DenseQuantizers",
    "KernelUnavailableError",
    "Quantizer",
    "Report",
    "ScaledArray",
    "ScalingMode",
    "__version__",
    "checkpoint_policies",
    "dense",
    "dot_general",
    "explain",
    "fuse",
    "gemm",
    "layer_norm",
    "layer_norm_dense",
    "layer_norm_mlp",
    "quantize",
    "recipes",
    "rms_norm",
    "rules",
    "softmax",
    "use_kernels",
]
