"""Sharding rules: pure functions from shapes and specs to plans. No arrays, no devices."""

from shardops.rules.gemm import plan_gemm
from shardops.rules.gemm_dims import GemmPlan as Plan
from shardops.rules.scales import scale_shape, scale_spec
from shardops.rules.step import Step

__all__ = ["Plan", "Step", "plan_gemm", "scale_shape", "scale_spec"]
