"""Sharding rules: pure functions from shapes and specs to plans. No arrays, no devices."""

from shardops.rules.gemm import plan_gemm
from shardops.rules.gemm_dims import GemmPlan as Plan
from shardops.rules.rowwise import RowwiseCall, RowwisePlan, plan_rowwise
from shardops.rules.scales import scale_shape, scale_spec
from shardops.rules.softmax import SoftmaxPlan, plan_softmax
from shardops.rules.step import Step

__all__ = [
    "Plan",
    "RowwiseCall",
    "RowwisePlan",
    "SoftmaxPlan",
    "Step",
    "plan_gemm",
    "plan_rowwise",
    "plan_softmax",
    "scale_shape",
    "scale_spec",
]
