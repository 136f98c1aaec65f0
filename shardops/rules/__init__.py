"""Sharding rules: pure functions from shapes and specs to plans. No arrays, no devices."""

from shardops.rules.gemm import plan_gemm
from shardops.rules.gemm_dims import GemmPlan as Plan
from shardops.rules.reduction import Reduction
from shardops.rules.rowwise import RowwisePlan, plan_rowwise
from shardops.rules.scales import scale_shape, scale_spec

__all__ = [
    "Plan",
    "Reduction",
    "RowwisePlan",
    "plan_gemm",
    "plan_rowwise",
    "scale_shape",
    "scale_spec",
]
