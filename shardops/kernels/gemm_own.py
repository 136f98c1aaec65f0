"""Products that kernels of this library make: called while JAX lowers.

Flat ones, whose result takes the time, and small ones, whose launch does.
"""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from shardops import errors
from shardops.kernels import compile, gemm_flat, gemm_small, launch, nvrtc
from shardops.kernels.gemm_flat import FlatProblem
from shardops.kernels.gemm_layout import Layout
from shardops.kernels.launch import Launch
from shardops.kernels.target import Target, current_target

PIECE = 8  # elements of a copy, which every line is whole ones of
_LONGEST_LINE = 2**31 - 1


def product(lhs: jax.Array, rhs: jax.Array, shape: Layout, out_dtype: np.dtype) -> jax.Array | None:
    """The product of two operands, addressed as `shape` says; None where cuBLASLt is to make it.

    That is so too where the kernel can be neither found nor compiled.
    """
    problem = flat_problem(shape, lhs.dtype, out_dtype)
    plan = planned(problem, current_target)
    if problem is None or plan is None:
        return None
    operands = [shape.lhs.stored(lhs), shape.rhs.stored(rhs)]
    result = jax.ShapeDtypeStruct(shape.result, out_dtype)
    try:
        (out,) = launch.call(plan, operands, [result], [problem.shape])
    except errors.KernelUnavailableError as error:
        if _has_compiler():  # which refuses the kernel
            warnings.warn(f"{error} Until then cuBLASLt makes it.", RuntimeWarning, stacklevel=2)
        return None
    return out


def planned(problem: FlatProblem | None, find_target: Callable[[], Target]) -> Launch | None:
    """The launch that makes a product; None where that is cuBLASLt's."""
    if problem is None:
        return None
    try:
        target = find_target()
    except (errors.KernelUnavailableError, NotImplementedError):  # a GPU that cuBLASLt may serve
        return None
    plan = own_plan(problem, target)
    if plan is None:
        return None
    kernel = plan.kernel
    there = compile.available(kernel.file, kernel.name, kernel.constants, target.arch)
    return plan if there else None


def own_plan(problem: FlatProblem, target: Target) -> Launch | None:
    """The launch that takes less time than cuBLASLt's, a pure function; None where none does."""
    if gemm_flat.gains(problem, target):
        return gemm_flat.flat_plan(problem, target)
    return gemm_small.small_plan(problem) if gemm_small.gains(problem, target) else None


def _has_compiler() -> bool:
    try:
        nvrtc.version()
    except errors.KernelUnavailableError:
        return False
    return True


def flat_problem(shape: Layout, dtype: np.dtype, out_dtype: np.dtype) -> FlatProblem | None:
    """A product as its kernel is told of it; None where that cannot make it."""
    if out_dtype != dtype or dtype not in (jnp.bfloat16, jnp.float16) or shape.batch != 1:
        return None
    lines = (
        shape.m if shape.lhs.transposed else shape.k,
        shape.k if shape.rhs.transposed else shape.n,
        shape.n,
        shape.lhs.ld,
        shape.rhs.ld,
    )
    if any(length % PIECE or length > _LONGEST_LINE for length in lines):
        return None
    return FlatProblem(
        shape.m,
        shape.n,
        shape.k,
        dtype.name,
        shape.lhs.transposed,
        shape.rhs.transposed,
        shape.lhs.ld,
        shape.rhs.ld,
    )
