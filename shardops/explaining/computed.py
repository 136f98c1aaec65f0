"""How a product is computed on a device, where that is not plain from its operands."""

import math

import jax
import jax.numpy as jnp

from shardops.kernels.gemm_layout import Layout, layout
from shardops.kernels.gemm_own import flat_problem, planned
from shardops.kernels.gemm_padding import padded
from shardops.kernels.target import Target, current_target, named_target, target_for
from shardops.primitives.gemm_op import GemmOp
from shardops.primitives.gemm_scaled import ScaledGemmOp
from shardops.recording import Record
from shardops.rules.spec import Spec

_WITHOUT_A_GPU = target_for("sm_90", 132)


def computed(record: Record) -> str | None:
    """Of quantised operands the arithmetic that the device's share runs in, and why; of others what
    is copied first; None of other ops."""
    op = record.op
    if isinstance(op, GemmOp):
        return _made(record, op) if op.kernel else None
    if not isinstance(op, ScaledGemmOp):
        return None
    if not op.kernel:
        return "dequantised to float32: the op does not run as a kernel"
    arch = _target().arch
    shapes, dtypes = _of_data(record, op)
    why = op.local_plan(shapes, dtypes, arch).why
    return why if why.startswith(arch) else f"on {arch} {why}"


def _target() -> Target:
    if (named := named_target()) is not None:
        return named
    try:
        on_gpu = jax.default_backend() == "gpu"
    except RuntimeError:  # no device at all: the command plans for other machines
        on_gpu = False
    return current_target() if on_gpu else _WITHOUT_A_GPU


def _made(record: Record, op: GemmOp) -> str | None:
    """The operands that are copied first, as cuBLASLt cannot read them where they are, or slowly;
    and the kernel, where it is none of cuBLASLt's."""
    shapes, dtypes = _of_data(record, op)
    if any(0 in shape for shape in shapes):
        return None
    lhs, rhs = shapes
    found = layout(lhs, rhs, op.contracting, op.batch)
    moved = [n for n in ("lhs", "rhs") if getattr(found, n).permutation is not None]
    notes = [f"from a transposed copy of {' and of '.join(moved)}"] if moved else []
    itemsize, out_itemsize = (jnp.dtype(name).itemsize for name in (dtypes[0], op.out_dtype))
    larger = padded(found, itemsize, out_itemsize, 1 + op.add + op.save)
    if larger is not None:
        names = [n for n in ("m", "n", "k") if getattr(larger, n) != getattr(found, n)]
        changes = (f"{n} from {getattr(found, n)} to {getattr(larger, n)}" for n in names)
        notes.append(f"padded for aligned rows: {', '.join(changes)}")
    kernel = _own_kernel(found, dtypes, op)
    if kernel is not None:
        notes.append(f"by the kernel {kernel}")
    return "; ".join(notes) or None


def _own_kernel(found: Layout, dtypes: list[str], op: GemmOp) -> str | None:
    # A precise product is one in float32 where it is summed over the mesh.
    if dtypes[0] != dtypes[1] or op != op.bare or op.precise:
        return None
    problem = flat_problem(found, jnp.dtype(dtypes[0]), jnp.dtype(op.out_dtype))
    plan = planned(problem, _target)
    return None if plan is None else plan.kernel.name


def _of_data(record: Record, op: GemmOp | ScaledGemmOp) -> tuple[list[tuple[int, ...]], list[str]]:
    """Shapes on a device and dtypes of lhs and rhs."""
    indices = [op.operands.index(name) for name in ("lhs", "rhs")]
    shapes = [_local(record, record.shapes[i], record.placement.operands[i]) for i in indices]
    return shapes, [record.dtypes[i] for i in indices]


def _local(record: Record, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    sizes = dict(record.sizes)
    return tuple(
        -(-n // math.prod(sizes[a] for a in dim)) for n, dim in zip(shape, spec, strict=True)
    )
