"""Launch plans of the norms, over all row lengths: pure functions, no compiler, no device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardops.kernels import norm_plan
from shardops.kernels.norm_plan import backward_plan, forward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import QuantizedNorm, quantized_forward_plan
from shardops.kernels.quantize_plan import QuantizeProblem
from shardops.kernels.target import target_for
from tests.kernels.norm_launches import check_finish, check_launch, check_rows, check_staged

TARGETS = [target_for("sm_80", 108), target_for("sm_89", 128), target_for("sm_90", 132)]
TARGETS += [target_for("sm_100", 148), target_for("sm_120", 188), target_for("sm_unknown", 1)]
TARGETS += [replace(target_for("sm_90", 16), largest_cluster=8)]  # a slice of a GPU
DTYPES = ("float32", "bfloat16", "float16")
STATIC_SHARED = 48 * 1024  # what a block has without opting in


def of_a_memory(problem: NormProblem) -> NormProblem:
    """No more rows than 256 GiB hold of x in float32: of what is longer no GPU has x and y."""
    return replace(problem, rows=min(problem.rows, max(1, 2**36 // problem.cols)))


problems = st.builds(
    NormProblem,
    rows=st.one_of(st.integers(1, 300), st.integers(1, 2**40)),
    cols=st.one_of(
        st.integers(1, 300),
        st.integers(1, 70_000),
        st.integers(1, 2_000).map(lambda n: 64 * n),
        st.integers(1, 2**22),
    ),
    kind=st.sampled_from(["layer", "rms"]),
    x=st.sampled_from(DTYPES),
    gamma=st.sampled_from(DTYPES),
    beta=st.sampled_from([None, *DTYPES]),
    add=st.booleans(),
    zero_centered=st.booleans(),
).map(of_a_memory)


@settings(max_examples=400)
@given(problem=problems, target=st.sampled_from(TARGETS))
def test_forward_plan_keeps_limits(problem, target):
    plan = forward_plan(problem, target)
    launch = plan.main
    check_rows(launch, problem, target)
    constants = dict(launch.kernel.constants)
    if launch.resident:
        assert plan.pairs == (problem.rows, launch.grid[0], 2)
        assert launch.zeroed == (2 + problem.add + (problem.kind == "layer"),)
    elif "TILE_ROWS" in constants:
        tiles = -(-problem.rows // constants["TILE_ROWS"])
        resident = target.resident_clusters(constants["CLUSTER"], constants["MIN_BLOCKS"])
        owners = launch.grid[0] // constants["CLUSTER"]
        if constants["STAGES"] == 1:
            assert owners == tiles
        elif problem.cols % constants["VECTOR"]:  # ragged: whole periods of rows
            assert min(tiles, resident) - 8 < owners <= max(8, resident)
        else:
            assert owners == min(tiles, resident)
    elif launch.kernel.name == "norm_forward_split":
        sums = plan.sums
        check_rows(sums.launch, problem, target)
        assert sums.workspace == (problem.rows, -(-sums.launch.grid[0] // problem.rows), 3) or (
            sums.launch.grid[0] == 2**31 - 1
        )
    elif launch.kernel.name == "norm_forward_cluster":
        assert launch.grid[0] == problem.rows * constants["CLUSTER"]
    elif launch.kernel.name == "norm_forward":
        assert launch.grid[0] == -(-problem.rows // launch.block[1])
        assert launch.shared_bytes == 0


@settings(max_examples=400)
@given(problem=problems, target=st.sampled_from(TARGETS))
def test_backward_plan_keeps_limits(problem, target):
    plan = backward_plan(problem, target)
    check_rows(plan.main, problem, target)
    if plan.finish is None:
        assert plan.workspace == (problem.rows, plan.main.grid[0], 2)
        assert plan.main.zeroed == (1 + problem.sums,)
        return
    sums, blocks, cols = plan.workspace
    assert (sums, cols) == (1 + (problem.beta is not None), problem.cols)
    constants = dict(plan.main.kernel.constants)
    if plan.sums is not None:
        check_rows(plan.sums.launch, problem, target)
        assert plan.main.grid[0] % blocks == 0
        check_finish(plan, problem, target)
        return
    cluster = constants.get("CLUSTER", 1)
    assert blocks * cluster == plan.main.grid[0]
    # Each block has a first row, since it writes its partials rather than adding to them.
    assert blocks <= -(-problem.rows // constants.get("TILE_ROWS", constants.get("ROWS_PER_BLOCK")))
    # All blocks are resident at once; a second wave would be a tail.
    least = 8 if problem.cols % constants["VECTOR"] else 1  # a ragged row's next place
    assert blocks * cluster <= max(least * cluster, target.sm_count * constants["MIN_BLOCKS"])
    if cluster > 1 or "STAGES" in constants:  # sums of a block's rows meet in the stages
        assert plan.main.shared_bytes >= 4 * constants["CHUNK"]
    elif constants["ROWS_PER_BLOCK"] > 1:  # sums of a block's rows meet in shared memory
        assert 4 * cols < STATIC_SHARED

    check_finish(plan, problem, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_length_up_to_3000_has_a_plan(dtype):
    target = TARGETS[2]
    for cols in range(1, 3001):
        problem = NormProblem(1000, cols, "layer", dtype, "float32", "float32", add=True)
        check_rows(forward_plan(problem, target).main, problem, target)
        check_rows(backward_plan(problem, target).main, problem, target)


def test_plan_does_not_depend_on_rows_beyond_the_grid():
    """One compiled kernel serves every batch size."""
    small, large = (NormProblem(rows, 4096, "rms", "bfloat16", "float32") for rows in (64, 2**20))
    target = TARGETS[2]
    for plan, part in ((forward_plan, "main"), (backward_plan, "main"), (backward_plan, "finish")):
        of_small, of_large = (getattr(plan(p, target), part) for p in (small, large))
        assert of_small.kernel == of_large.kernel


@pytest.mark.parametrize("scales", ["tensor", "row32"])
def test_many_short_rows_that_are_quantised_keep_the_grid(scales):
    written = QuantizeProblem(1, 1, 2**33, 1, "bfloat16", "float8_e4m3fn", scales)
    norm = NormProblem(2**33, 1, "rms", "bfloat16", "bfloat16")
    for target in TARGETS:
        plan = quantized_forward_plan(QuantizedNorm(norm, written), target)
        assert plan is not None
        check_launch(plan.main, target)


@pytest.mark.parametrize("cols", [7, 1000, 4096, 5120, 65536])
def test_vector_is_widest_that_divides(cols):
    problem = NormProblem(1, cols, "rms", "bfloat16", "bfloat16")
    assert problem.vector == max(n for n in (1, 2, 4, 8) if cols % n == 0)
    assert norm_plan.forward_geometry(problem, TARGETS[2]).threads_per_row >= 1


@pytest.mark.parametrize("cols", [1001, 2047, 5001, 20_001, 65_537])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_long_rows_of_odd_length_move_as_words(cols, kind):
    problem = NormProblem(4096, cols, kind, "bfloat16", "bfloat16", None)
    for launch in (forward_plan(problem, TARGETS[2]).main, backward_plan(problem, TARGETS[2]).main):
        assert dict(launch.kernel.constants)["VECTOR"] == 8
        check_rows(launch, problem, TARGETS[2])


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_rows_too_long_for_a_cluster_fill_the_gpu(target):
    problem = NormProblem(8, 2**20, "layer", "bfloat16", "bfloat16", "bfloat16")
    for plan in (forward_plan(problem, target), backward_plan(problem, target)):
        for launch in (plan.main, *([] if plan.sums is None else [plan.sums.launch])):
            assert launch.grid[0] >= target.sm_count
            assert launch.resident == (plan.sums is None)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("cols", [8, 24, 40, 64])
def test_short_rows_with_a_residual_have_a_word_a_thread(cols, kind):
    for target in TARGETS:
        problem = NormProblem(1000, cols, kind, "bfloat16", "bfloat16", None, add=True)
        across, down, _ = forward_plan(problem, target).main.block
        assert problem.vectors <= across < 2 * problem.vectors
        assert across * down == 128


@pytest.mark.parametrize("cols", [2**18, 2**20, 2**20 + 1])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_very_long_rows_are_read_once(cols, kind):
    for rows in (8, 64):
        problem = NormProblem(rows, cols, kind, "bfloat16", "bfloat16", None)
        forward, backward = forward_plan(problem, TARGETS[2]), backward_plan(problem, TARGETS[2])
        # Clusters take few rows of an RMSNorm, which have nothing to be set to zero before, and
        # by the table many rows of 2**18.
        in_clusters = cols == 2**18 and (rows == 64 or kind == "rms")
        assert forward.main.resident != in_clusters
        assert forward.main.cluster == ((8 if rows == 8 else 16) if in_clusters else 1, 1, 1)
        assert backward.main.resident
        for plan in (forward, backward):
            assert plan.sums is None
            check_rows(plan.main, problem, TARGETS[2])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_few_long_rows_write_fewer_partial_sums_than_there_are_rows(kind):
    few, many = (NormProblem(n, 16384, kind, "bfloat16", "bfloat16") for n in (128, 4096))
    target = TARGETS[2]
    partials = [backward_plan(problem, target).workspace[1] for problem in (few, many)]
    assert partials[0] <= 33 < partials[1]
    check_staged(backward_plan(few, target).main, few, target)
