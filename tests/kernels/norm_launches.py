"""What every launch of a norm's kernels keeps: limits of CUDA, and what the sources count on."""

from shardops.kernels.launch import Launch
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.target import Target
from tests.kernels.resident_launches import check_resident


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


def check_finish(plan, problem: NormProblem, target: Target) -> None:
    sums, _, cols = plan.workspace
    finish = check_launch(plan.finish, target)
    assert plan.finish.block == (finish["TILE_COLS"], finish["TILE_ROWS"], 1)
    assert plan.finish.grid[0] * finish["TILE_COLS"] >= cols
    assert (plan.finish.grid[0] - 1) * finish["TILE_COLS"] < cols
    assert plan.finish.grid[1] == sums
    assert plan.finish.early == (target.arch not in ("sm_unknown", "sm_80", "sm_86", "sm_89"))
