"""The norm kernels run on the host: one problem, forward and backward, against float64."""

import pathlib
from typing import Any

import numpy as np

from shardops.kernels.norm_plan import backward_plan, forward_plan
from shardops.kernels.target import target_for
from tests import references
from tests.closeness import epsilon
from tests.kernels import emulator
from tests.kernels.norm_problems import DTYPES, Arrays, blank, random_arrays

# Few multiprocessors, so that a block gets several rows.
TARGET = target_for("sm_90", 2)
EPSILON = np.float32(1e-5)


def forward(
    problem, arrays: Arrays, built, geometry=None, offset=0, epsilon=EPSILON
) -> dict[str, np.ndarray]:
    shape, rows = arrays.x.shape, arrays.x.shape[:1]
    results = {"y": blank(shape, problem.x, offset)}
    results |= {"h": blank(shape, problem.x, offset)} if problem.add else {}
    results |= {"mean": blank(rows, "float32")} if problem.kind == "layer" else {}
    results |= {"rstd": blank(rows, "float32")}
    operands = [arrays.x, arrays.gamma, arrays.beta, arrays.add]
    wanted, scalars = list(results.values()), [np.int64(rows[0]), epsilon]
    plan = forward_plan(problem, TARGET, geometry)
    if plan.sums is not None:
        moments = blank(plan.sums.workspace, "float32")
        first, hidden = (
            ([arrays.x, arrays.add], [results["h"]]) if problem.add else ([arrays.x], [])
        )
        emulator.run(plan.sums.launch, built, first, [*hidden, moments], scalars[:1])
        operands = [results.get("h", arrays.x), arrays.gamma, arrays.beta, moments]
        wanted = [value for name, value in results.items() if name != "h"]
    if plan.pairs is not None:
        wanted.append(np.zeros(plan.pairs, np.uint32))
    emulator.run(
        plan.main,
        built,
        [operand for operand in operands if operand is not None],
        wanted,
        scalars,
    )
    return results


def backward(problem, arrays: Arrays, saved, built, geometry=None, offset=0):
    plan = backward_plan(problem, TARGET, geometry)
    h = saved.get("h", arrays.x)
    dx = blank(h.shape, problem.x, offset)
    operands = [arrays.dy, h, arrays.gamma, saved.get("mean"), saved["rstd"]]
    operands = [operand for operand in operands if operand is not None]
    last = [arrays.dh] if problem.add else []
    if plan.sums is not None:
        last.append(blank(plan.sums.workspace, "float32"))
        emulator.run(plan.sums.launch, built, operands, last[-1:], [np.int64(len(h))])
    sums = [blank(arrays.gamma.shape, "float32") for _ in range(problem.sums)]
    if plan.finish is None:
        pairs = np.zeros(plan.workspace, np.uint32)
        emulator.run(plan.main, built, operands + last, [dx, *sums, pairs], [np.int64(len(h))])
        return dx, *sums
    partials = blank(plan.workspace, "float32")
    emulator.run(plan.main, built, operands + last, [dx, partials], [np.int64(len(h))])
    emulator.run(plan.finish, built, [partials], sums, [np.int32(plan.workspace[1])])
    return dx, *sums


def assert_close(name: str, got: np.ndarray, want: np.ndarray, bound: float, least=0.0) -> None:
    """The error against the size of what is wanted, or of the parts that it is left of."""
    scale = max(np.linalg.norm(want), least) or 1.0
    error = np.linalg.norm(got.astype(np.float64) - want) / scale
    assert error <= bound, f"{name}: relative error {error:.2e}, bound {bound:.2e}"


# Rounding a result costs half a unit; float32 sums of n terms about sqrt(n) units of float32, less
# than 1e-6 up to the lengths here.
def bound(dtype: str) -> float:
    return epsilon(DTYPES[dtype]) / 2 + 1e-6


def check(
    problem,
    built: pathlib.Path,
    rng: np.random.Generator,
    geometry: Any,
    offset: int | tuple[int, int],
) -> None:
    """Values, statistics and gradients of one problem; two offsets: of operands, of results."""
    of_operands, offset = offset if isinstance(offset, tuple) else (offset, offset)
    arrays = random_arrays(problem, rng, of_operands)
    got = check_forward(problem, arrays, built, geometry, offset)
    dx, *sums = backward(problem, arrays, got, built, geometry, offset)
    vjp = references.layer_norm_vjp_reference
    if problem.kind == "rms":
        vjp = references.rms_norm_vjp_reference
    wanted = vjp(arrays.dy, arrays.x, arrays.gamma, dh=arrays.dh, **_options(problem, arrays))
    parts = 0.0
    if problem.cols == 1:  # dx is what is left of a difference of equals
        parts = np.linalg.norm(arrays.dy * arrays.gamma.astype(np.float64) * got["rstd"][:, None])
    assert_close("dx", dx, wanted.x, bound(problem.x), parts)
    assert_close("dgamma", sums[0], wanted.gamma, 2e-6)
    if problem.beta is not None:
        assert_close("dbeta", sums[1], wanted.beta, 2e-6)


def check_forward(
    problem, arrays: Arrays, built: pathlib.Path, geometry: Any, offset: int = 0
) -> dict[str, np.ndarray]:
    """Values and statistics of one problem, which it returns."""
    got = forward(problem, arrays, built, geometry, offset)
    if problem.kind == "layer":
        want = references.layer_norm_reference(
            arrays.x, arrays.gamma, arrays.beta, **_options(problem, arrays)
        )
    else:
        want = references.rms_norm_reference(arrays.x, arrays.gamma, **_options(problem, arrays))
    assert_close("y", got["y"], want.y, bound(problem.x))
    if problem.add:
        np.testing.assert_array_equal(got["h"].astype(np.float64), want.h)
    mean = want.h.mean(1) if problem.kind == "layer" else np.zeros(problem.rows)
    if problem.kind == "layer":
        assert_close("mean", got["mean"], mean, 1e-6)
    rstd = 1 / np.sqrt(((want.h - mean[:, None]) ** 2).mean(1) + EPSILON)
    assert_close("rstd", got["rstd"], rstd, 1e-6)
    return got


def _options(problem, arrays: Arrays) -> dict[str, Any]:
    return {"add": arrays.add, "epsilon": EPSILON, "zero_centered_gamma": problem.zero_centered}
