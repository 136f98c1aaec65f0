"""Launch plans of the norms, over all row lengths: pure functions, no compiler, no device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardops.kernels import norm_plan
from shardops.kernels.launch import Launch
from shardops.kernels.norm_plan import backward_plan, forward_plan
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.norm_quantized_plan import QuantizedNorm, quantized_forward_plan
from shardops.kernels.quantize_plan import QuantizeProblem
from shardops.kernels.target import Target, target_for
from tests.kernels.resident_launches import check_resident

TARGETS = [target_for("sm_80", 108), target_for("sm_89", 128), target_for("sm_90", 132)]
TARGETS += [target_for("sm_100", 148), target_for("sm_unknown", 1)]
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


def check_launch(launch: Launch, target: Target) -> dict[str, int]:
    """The limits of CUDA, and that the constants say what the launch does."""
    constants = dict(launch.kernel.constants)
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    assert 32 <= threads <= 1024
    assert threads % 32 == 0
    assert 1 <= launch.grid[0] <= 2**31 - 1
    assert 1 <= launch.grid[1] <= 65535
    assert launch.grid[2] == 1
    assert launch.shared_bytes <= target.shared_bytes
    assert all(isinstance(value, int) for value in constants.values())
    return constants


def check_staged(launch: Launch, problem: NormProblem, target: Target) -> None:
    """Of csrc/kernels/tiles.cuh: the sizes its static assertions and its copies count on."""
    constants = check_launch(launch, target)
    group, threads = constants["THREADS_PER_ROW"], constants["THREADS"]
    assert launch.block == (threads, 1, 1)
    assert threads % group == 0
    assert group % 32 == 0 or (group < 32 and group & (group - 1) == 0)
    assert constants["TILE_ROWS"] % (threads // group) == 0
    assert group > 32 or constants["TILE_ROWS"] == threads // group
    alone = constants["STAGES"] == 1  # a block has one tile and is done
    assert alone or constants["STAGES"] >= 3 + constants["STORE_TILES"]
    if alone:
        tiles = -(-problem.rows // constants["TILE_ROWS"])
        assert launch.grid[0] == tiles * constants["CLUSTER"]
    assert launch.shared_bytes == constants["SHARED_BYTES"]
    itemsize = 4 if problem.x == "float32" else 2
    cluster, chunk = constants["CLUSTER"], constants["CHUNK"]
    assert launch.cluster == (cluster, 1, 1)
    assert cluster <= 16
    assert launch.grid[0] % cluster == 0
    assert launch.align == 16
    ragged = problem.cols % constants["VECTOR"] != 0
    whole = problem.cols // constants["VECTOR"] * constants["VECTOR"]  # columns in whole words
    if cluster == 1:
        assert chunk == whole
    else:
        assert constants["TILE_ROWS"] == 1
        assert group == threads
        assert (cluster - 1) * chunk < whole <= cluster * chunk
        assert ragged or problem.cols * itemsize % 16 == 0
    assert chunk % constants["VECTOR"] == 0
    assert ragged or constants["TILE_ROWS"] * chunk * itemsize % 16 == 0
    if ragged:
        assert constants["VECTOR"] * itemsize == 16
        assert group >= 32
        assert constants["TILE_ROWS"] == threads // group
        assert not constants["STORE_TILES"]
        assert_same_place(problem, launch.grid[0] // cluster * constants["TILE_ROWS"])
    per_thread = -(-chunk // constants["VECTOR"] // group) * constants["VECTOR"]
    assert per_thread <= 128
    blocks = constants["MIN_BLOCKS"]
    assert threads * blocks <= target.threads_per_sm
    assert (launch.shared_bytes + 1024) * blocks <= target.shared_bytes + 1024


def assert_same_place(problem: NormProblem, stride: int) -> None:
    """Whoever goes on by `stride` rows starts at the same place of a 16-byte word, or is done."""
    itemsize = 4 if problem.x == "float32" else 2
    assert stride >= problem.rows or stride * problem.cols * itemsize % 16 == 0


def check_split(launch: Launch, problem: NormProblem, target: Target) -> None:
    """Of csrc/kernels/norm_split.cuh."""
    constants = check_launch(launch, target)
    assert launch.block == (constants["THREADS"], 1, 1)
    assert constants["THREADS"] % 32 == 0
    itemsize = 4 if problem.x == "float32" else 2
    assert constants["VECTOR"] * itemsize == 16
    assert launch.shared_bytes == 0
    if launch.kernel.name.endswith("_split"):
        of_row = -(-problem.covered.cols // (constants["THREADS"] * constants["VECTOR"]))
        groups, rest = divmod(launch.grid[0], of_row)
        assert rest == 0
        assert 1 <= groups <= problem.rows
        assert_same_place(problem, groups)


def check_ragged(launch: Launch, problem: NormProblem, target: Target) -> None:
    """Of csrc/kernels/norm_forward_ragged.cuh and ragged_slice.cuh."""
    constants = check_launch(launch, target)
    group, rows = constants["THREADS_PER_ROW"], constants["ROWS_PER_BLOCK"]
    assert launch.block == (group, rows, 1)
    assert launch.align == 16
    itemsize = 4 if problem.x == "float32" else 2
    assert constants["VECTOR"] * itemsize == 16
    assert group >= 2 * constants["VECTOR"]
    assert group % 32 == 0 or (group < 32 and group & (group - 1) == 0)
    assert_same_place(problem, constants["PERIOD"])
    assert launch.grid[0] % constants["PERIOD"] == 0
    blocks = constants["MIN_BLOCKS"]
    assert group * rows * blocks <= target.threads_per_sm
    assert (launch.shared_bytes + 2048) * blocks <= target.shared_bytes + 1024


def check_rows(launch: Launch, problem: NormProblem, target: Target) -> None:
    if launch.resident:
        check_launch(launch, target)
        backward = launch.kernel.name == "norm_backward_resident"
        itemsize = 4 if problem.x == "float32" else 2
        operands = 1 + problem.add + backward
        own = 4 if problem.gamma == "float32" else 2
        check_resident(launch, target, problem.cols, itemsize, operands, own)
        return
    if launch.kernel.name.endswith("_ragged"):
        check_ragged(launch, problem, target)
        return
    if launch.kernel.name.endswith("_staged"):
        check_staged(launch, problem, target)
        return
    if launch.kernel.name.endswith(("_sums", "_split")):
        check_split(launch, problem, target)
        return
    constants = check_launch(launch, target)
    assert launch.block[:2] == (constants["THREADS_PER_ROW"], constants["ROWS_PER_BLOCK"])
    assert problem.cols % constants["VECTOR"] == 0
    width = constants["VECTOR"] * (4 if problem.x == "float32" else 2)
    assert width in (2, 4, 8, 16)
    assert width == 16 or problem.cols * width // constants["VECTOR"] % (2 * width)
    threads = constants["THREADS_PER_ROW"]
    # Threads that share a warp between rows are a power of two; others are whole warps.
    assert threads % 32 == 0 or (threads < 32 and threads & (threads - 1) == 0)
    chunk = constants.get("CHUNK", problem.cols)  # of a block of a cluster
    per_thread = -(-(chunk // constants["VECTOR"]) // threads)
    assert per_thread * max(4, width) <= 256, "a thread's part of a row is at most 64 registers"
    assert threads * constants["ROWS_PER_BLOCK"] * constants["MIN_BLOCKS"] <= target.threads_per_sm
    # No warp without a part of the row: the merge of moments divides by the part's length.
    last = problem.cols - (constants.get("CLUSTER", 1) - 1) * chunk
    assert threads <= 32 or (threads - 32) * constants["VECTOR"] < last <= chunk


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


def check_finish(plan, problem: NormProblem, target: Target) -> None:
    sums, _, cols = plan.workspace
    finish = check_launch(plan.finish, target)
    assert plan.finish.block == (finish["TILE_COLS"], finish["TILE_ROWS"], 1)
    assert plan.finish.grid[0] * finish["TILE_COLS"] >= cols
    assert (plan.finish.grid[0] - 1) * finish["TILE_COLS"] < cols
    assert plan.finish.grid[1] == sums
    assert plan.finish.early == (target.arch not in ("sm_unknown", "sm_80", "sm_86", "sm_89"))


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


@pytest.mark.parametrize("cols", [2**18, 2**20, 2**20 + 1])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_very_long_rows_are_read_once(cols, kind):
    for rows in (8, 64):
        problem = NormProblem(rows, cols, kind, "bfloat16", "bfloat16", None)
        forward, backward = forward_plan(problem, TARGETS[2]), backward_plan(problem, TARGETS[2])
        # Clusters take few rows of an RMSNorm, which have nothing to be set to zero before.
        assert forward.main.resident == (rows == 64 or kind == "layer" or cols > 2**18)
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
