"""How a product of quantised operands is computed on a device."""

import math

import jax

from shardops.kernels.target import current_target
from shardops.primitives.gemm_scaled import ScaledGemmOp
from shardops.recording import Record
from shardops.rules.spec import Spec

_WITHOUT_A_GPU = "sm_90"


def computed(record: Record) -> str | None:
    """In what arithmetic the device's share runs, and why; None of other ops."""
    op = record.op
    if not isinstance(op, ScaledGemmOp):
        return None
    if not op.kernel:
        return "dequantised to float32: the op does not run as a kernel"
    on_gpu = jax.default_backend() == "gpu"
    arch = current_target().arch if on_gpu else _WITHOUT_A_GPU
    of_data = [op.operands.index(name) for name in ("lhs", "rhs")]
    plan = op.local_plan(
        [_local(record, record.shapes[i], record.placement.operands[i]) for i in of_data],
        [record.dtypes[i] for i in of_data],
        arch,
    )
    return f"on {arch} {plan.why}"


def _local(record: Record, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    sizes = dict(record.sizes)
    return tuple(
        -(-n // math.prod(sizes[a] for a in dim)) for n, dim in zip(shape, spec, strict=True)
    )
