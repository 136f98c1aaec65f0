"""Sharding-aware GEMM, normalisation and softmax for JAX."""

from shardops import checkpoint_policies, rules
from shardops.config import use_kernels
from shardops.errors import KernelUnavailableError
from shardops.explaining import Report, explain
from shardops.primitives.dot import dot_general
from shardops.primitives.gemm import gemm
from shardops.primitives.norm import layer_norm, rms_norm
from shardops.primitives.scaled import ScaledArray, ScalingMode
from shardops.primitives.softmax import softmax
from shardops.version import __version__

__all__ = [
    "KernelUnavailableError",
    "Report",
    "ScaledArray",
    "ScalingMode",
    "__version__",
    "checkpoint_policies",
    "dot_general",
    "explain",
    "gemm",
    "layer_norm",
    "rms_norm",
    "rules",
    "softmax",
    "use_kernels",
]
