"""What a plan takes: a fraction of a millisecond, and next to nothing once it is remembered.

Bounds are generous, for machines that do other things as well; the figures are printed.
"""

import random
from statistics import median
from time import process_time

import pytest

from shardops.rules import gemm, layouts, moves, product_layouts, rowwise
from shardops.rules.gemm_dims import GemmDims
from shardops.rules.rowwise import RowwiseCall
from shardops.rules.spec import divisible
from tests.rules.simulator import random_spec

MESH = (("data", 4), ("fsdp", 2), ("tensor", 8))
AXES = tuple(a for a, _ in MESH)
TABLES = (layouts.layouts_of, product_layouts.product_layouts)
PLANS = (gemm.plan, moves._way, rowwise.plan_rowwise)


def forget(*remembered):
    for function in remembered:
        function.cache_clear()


def projection(n):
    """[B, S, H, D] times [H, D, E]: no two of them of the same lengths."""
    return GemmDims((32, 512 * (n + 1), 64, 128), (64, 128, 1024), (2, 3), (0, 1))


def scores(n):
    """[B, H, S, D] times [B, H, T, D], batched over both first dims."""
    shape = (16, 32, 512 * (n + 1), 128)
    return GemmDims(shape, shape, (3,), (3,), (0, 1), (0, 1))


def seconds(plan, *args):
    began = process_time()
    plan(*args)
    return process_time() - began


def say(what, first, later, again):
    print(f"\n{what}: first {first * 1e3:.1f} ms, then {median(later) * 1e3:.2f} ms ", end="")
    print(f"(at most {max(later) * 1e3:.1f} ms), again {again * 1e6:.1f} us")


def shardings(dims, rng):
    return tuple(
        divisible(s, random_spec(rng, len(s), AXES), MESH) for s in (dims.lhs_shape, dims.rhs_shape)
    )


@pytest.mark.parametrize("wanted", [None, "cheapest"])
@pytest.mark.parametrize("product", [projection, scores])
def test_planning_takes_less_than_five_milliseconds(product, wanted):
    """Three axes and operands of four dims; lengths and shardings differ each time, and so nothing
    but the tables of layouts is remembered."""
    forget(*TABLES, *PLANS)
    rng = random.Random(0)
    calls = [(dims, *shardings(dims, rng), MESH, wanted) for dims in map(product, range(201))]
    first, *later = (seconds(gemm.plan, *call) for call in calls)
    again = median(seconds(gemm.plan, *call) for call in calls)
    say(f"{product.__name__}, {wanted}", first, later, again)
    assert gemm.plan.cache_info().misses == len(calls)
    assert median(later) < 5e-3
    assert again < 20e-6


def test_planning_along_rows_takes_less_than_five_milliseconds():
    forget(*TABLES, *PLANS)
    rng = random.Random(0)
    calls = []
    for n in range(201):
        call = RowwiseCall((16, 512 * (n + 1), 4096), (2, 2), (2,), parameters=1)
        calls.append((call, tuple(random_spec(rng, 3, AXES) for _ in range(2)), MESH))
    first, *later = (seconds(rowwise.plan_rowwise, *call) for call in calls)
    again = median(seconds(rowwise.plan_rowwise, *call) for call in calls)
    say("rows", first, later, again)
    assert median(later) < 5e-3
    assert again < 20e-6
