"""Launch plans of softmax, over all row lengths: pure functions, no compiler, no device."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardops.kernels import softmax
from shardops.kernels.softmax_plan import (
    MAX_KEYS,
    Plan,
    SoftmaxProblem,
    backward_plan,
    forward_plan,
    mask_rows,
)
from shardops.kernels.target import Target, target_for
from tests.kernels.resident_launches import check_resident

TARGETS = [target_for("sm_80", 108), target_for("sm_89", 128), target_for("sm_90", 132)]
TARGETS += [target_for("sm_120", 170), target_for("sm_unknown", 1)]
DTYPES = ("float32", "bfloat16", "float16")

problems = st.builds(
    SoftmaxProblem,
    rows=st.one_of(st.integers(1, 300), st.integers(1, 2**40)),
    keys=st.one_of(
        st.integers(1, 1100),
        st.integers(1, 70_000),
        st.integers(1, 2_000).map(lambda n: 64 * n),
        st.integers(1, MAX_KEYS),
    ),
    x=st.sampled_from(DTYPES),
    mask=st.sampled_from([0, 1, 2]),
    digits=st.integers(0, 3),
    causal=st.booleans(),
    first=st.booleans(),
    sign=st.sampled_from([-1, 0, 1]),
)


def check(plan: Plan, problem: SoftmaxProblem, target: Target, operands: int) -> None:
    """The limits of CUDA, that all rows and words have threads, and that registers hold them."""
    clusters = target.arch in ("sm_90", "sm_120")
    for launch in plan.launches:
        constants = dict(launch.kernel.constants)
        assert constants["WIDE_ROWS"] == (problem.rows * constants.get("PARTS", 1) >= 2**31)
        assert ("SCALE_SIGN" in constants) == (operands == 1)
        if launch.resident:
            assert not problem.causal
            assert operands == 2 or problem.mask == 0
            assert plan.workspace == (problem.rows, launch.grid[0], 2)
            assert launch.zeroed == (1,)
            itemsize = 16 // problem.vector
            check_resident(launch, target, problem.keys, itemsize, operands)
            return
        threads = math.prod(launch.block)
        assert 32 <= threads <= 1024
        assert threads % 32 == 0
        assert 1 <= launch.grid[0] <= 2**31 - 1
        assert launch.grid[1:] == (1, 1)
        assert launch.shared_bytes <= target.shared_bytes
        assert launch.cluster[1:] == (1, 1)
        assert launch.cluster[0] <= (16 if target.arch == "sm_90" else 8)
        assert launch.cluster[0] == 1 or clusters
        assert launch.grid[0] % launch.cluster[0] == 0
        blocks = constants["MIN_BLOCKS"]
        assert 1 <= blocks <= 32
        assert threads * blocks <= target.threads_per_sm
        if launch.kernel.name.endswith("_tile"):
            check_tile(launch, constants, problem, operands)
        else:
            parts = constants["PARTS"]
            assert launch.block[0] == constants["THREADS_PER_ROW"]
            assert launch.grid[0] % parts == 0
            if launch.kernel.name.endswith("_staged"):
                check_staged(launch, constants, problem, target, operands)
            elif launch.kernel.name.endswith("_long"):
                assert constants["STAGE"] == (0 if len(plan.launches) == 1 else 1) or plan.workspace
                assert launch.cluster[0] == (1 if plan.workspace else parts)
                assert launch.block[1] == 1
            else:
                assert launch.cluster[0] == parts
                assert launch.block[1] == constants["ROWS_PER_BLOCK"]
                each = -(-problem.whole_words // (parts * launch.block[0]))
                assert problem.even or launch.block[0] >= 2 * (problem.vector - 1)
                assert problem.even or problem.whole_words > 0
                assert each * 4 * operands <= 32, "a thread's words are at most 32 registers"
                rows_at_once = launch.grid[0] // parts * launch.block[1]
                assert rows_at_once >= min(problem.rows, 2**31 // parts - parts)
    if plan.workspace is None:
        assert len(plan.launches) == 1
    else:
        assert [dict(launch.kernel.constants)["STAGE"] for launch in plan.launches] == [1, 2]
        parts = dict(plan.launches[0].kernel.constants)["PARTS"]
        assert plan.workspace == (problem.rows, parts, 2)


def check_staged(launch, constants, problem, target: Target, operands: int) -> None:
    """A row's part fits in shared memory beside the exchange and a barrier a chunk."""
    parts, threads = constants["PARTS"], constants["THREADS_PER_ROW"]
    chunk = constants["BATCH"] * threads
    words = -(-problem.words // parts)
    chunks = -(-words // chunk)
    assert launch.cluster[0] == parts
    assert launch.block[1:] == (1, 1)
    copied = problem.keys % 16 == 0 and (parts == 1 or words * problem.vector % 16 == 0)
    mask_bytes = problem.vector * (constants["MASK"] == 1 and copied)
    control = launch.shared_bytes - chunks * chunk * (16 * operands + mask_bytes)
    assert control % 128 == 0
    pairs = parts * threads // 32
    assert control >= 8 * chunks + 16 * pairs * (pairs > 1) + 16 * (parts > 1)
    assert launch.grid[0] == parts * min(problem.rows, (2**31 - 1) // parts)
    of_all = constants["MIN_BLOCKS"] * (launch.shared_bytes + 1024)
    assert of_all <= target.shared_bytes + 1024, "as many blocks as are meant to be there fit"


def check_tile(launch, constants, problem: SoftmaxProblem, operands: int) -> None:
    rows, group, threads = (constants[name] for name in ("TILE_ROWS", "GROUP", "THREADS"))
    assert launch.block == (threads, 1, 1)
    assert group in (1, 2, 4, 8, 16, 32)
    assert rows % (threads // group) == 0
    assert rows * problem.keys % problem.vector == 0
    assert -(-problem.keys // group) <= 32
    size = 16 // problem.vector
    assert launch.shared_bytes == operands * rows * problem.keys * size
    assert launch.grid[0] == min(-(-problem.rows // rows), 2**31 - 1)


@settings(max_examples=400)
@given(problem=problems, target=st.sampled_from(TARGETS))
def test_softmax_plans_keep_limits(problem, target):
    check(forward_plan(problem, target), problem, target, 1)
    check(backward_plan(problem, target), problem, target, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_length_up_to_3000_has_a_plan(dtype):
    for keys in range(1, 3001):
        problem = SoftmaxProblem(1000, keys, dtype, mask=1, digits=2, causal=True)
        check(forward_plan(problem, TARGETS[2]), problem, TARGETS[2], 1)
        check(backward_plan(problem, TARGETS[2]), problem, TARGETS[2], 2)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_as_long_as_vocabularies_have_a_plan(dtype, target):
    for keys in (*range(16384, 131072, 1024), 50257, 50304, 100352, 128256, 151936):
        problem = SoftmaxProblem(2**15, keys, dtype)
        check(forward_plan(problem, target), problem, target, 1)
        check(backward_plan(problem, target), problem, target, 2)


def test_plan_does_not_depend_on_rows_beyond_the_grid():
    """One compiled kernel serves every batch size that fills the GPU."""
    for keys in (33, 4096, 65536):
        small, large = (SoftmaxProblem(rows, keys, "bfloat16") for rows in (600, 2**20))
        for plan in (forward_plan, backward_plan):
            kernels = [plan(p, TARGETS[2]).launches[0].kernel for p in (small, large)]
            assert kernels[0] == kernels[1]


def test_few_long_rows_are_cut_over_clusters():
    """8 rows of 262144 fill a GPU only 16 blocks a row; without clusters, by two launches."""
    problem = SoftmaxProblem(8, 262144, "bfloat16")
    (launch,) = forward_plan(problem, TARGETS[2]).launches
    assert (launch.grid[0], launch.cluster[0]) == (128, 16)
    plan = forward_plan(problem, TARGETS[0])
    assert len(plan.launches) == 2
    assert plan.launches[0].grid[0] >= TARGETS[0].sm_count


def test_few_rows_are_cut_over_small_blocks():
    """Up to 64 KiB a multiprocessor; of more, and of causal rows, a row has one block."""
    few, many = (SoftmaxProblem(rows, 16384, "bfloat16") for rows in (128, 1024))
    hidden = SoftmaxProblem(128, 16384, "bfloat16", causal=True)
    for plan in (forward_plan, backward_plan):
        (launch,) = plan(few, TARGETS[2]).launches
        assert (launch.grid[0], launch.cluster[0], launch.block[0]) == (512, 4, 128)
        assert plan(hidden, TARGETS[2]).launches[0].cluster[0] == 1
        assert plan(few, TARGETS[0]).launches[0].cluster[0] == 1  # a GPU without clusters
    assert forward_plan(many, TARGETS[2]).launches[0].cluster[0] == 1


def test_longer_rows_are_shared_by_all_blocks():
    """Unless keys are hidden: then clusters read them twice."""
    for keys in (2**20, 2**20 + 1):
        plain, masked = (SoftmaxProblem(64, keys, "bfloat16", mask) for mask in (0, 1))
        assert forward_plan(plain, TARGETS[2]).launches[0].resident
        assert backward_plan(plain, TARGETS[2]).launches[0].resident
        assert not forward_plan(masked, TARGETS[2]).launches[0].resident


def test_mask_of_scattered_dims_uses_the_words_of_backward_alone():
    """The backward has no mask: its kernel is the same with and without one."""
    plain, masked = (
        SoftmaxProblem(64, 4096, "float16", mask, 2 * mask, sign=s) for mask, s in ((0, 1), (1, -1))
    )
    assert backward_plan(plain, TARGETS[2]) == backward_plan(masked, TARGETS[2])


def test_mask_rows_finds_the_row_of_every_mask():
    shape = (2, 3, 1, 4, 2)
    for kept in itertools.product((False, True), repeat=len(shape)):
        own = tuple(n if keep else 1 for n, keep in zip(shape, kept, strict=True))
        mask = np.arange(math.prod(own)).reshape(own)
        want = np.broadcast_to(mask, shape).reshape(-1)
        digits = mask_rows(shape, own)
        for row in range(math.prod(shape)):
            found = 0
            for below, size in digits:
                found = found * size + row // below % size
            assert found == want[row], (own, digits, row)


def test_mask_with_too_many_digits_grows():
    shape, own = (2, 3, 2, 3, 2, 3, 2, 5), (2, 1, 2, 1, 2, 1, 2, 5)
    mask = np.zeros(own, bool)
    fitted, digits, kind = softmax._fitted(mask, shape)
    assert len(digits) <= 3
    assert kind == 1
    assert all(m in (1, n) for m, n in zip(fitted.shape, shape, strict=True))
    assert digits == mask_rows(shape[:-1], fitted.shape[:-1])


@given(
    value=st.one_of(st.integers(1, 2**31 - 1), st.integers(0, 30).map(lambda n: 2**n)),
    number=st.integers(0, 2**31 - 1),
)
def test_factor_and_shift_divide_every_row_number(value, number):
    exact, factor, shift = softmax._divisor(value)
    assert exact == value
    assert factor < 2**32
    for n in (number, number // value * value, max(0, number // value * value - 1), 2**31 - 1):
        assert n * factor >> (31 + shift) == n // value
