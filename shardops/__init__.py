"""Sharding-aware GEMM and normalisation for JAX."""

from shardops import rules
from shardops.config import use_kernels
from shardops.errors import KernelUnavailableError
from shardops.primitives.dot import dot_general
from shardops.primitives.gemm import gemm
from shardops.primitives.norm import layer_norm, rms_norm
from shardops.version import __version__

__all__ = [
    "KernelUnavailableError",
    "__version__",
    "dot_general",
    "gemm",
    "layer_norm",
    "rms_norm",
    "rules",
    "use_kernels",
]
