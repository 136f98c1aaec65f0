"""How close is close enough: one metric for every op, and where its bound comes from."""

import jax
import ml_dtypes
import numpy as np

FLOAT32_EPSILON = float(np.finfo(np.float32).eps)


def epsilon(dtype) -> float:
    dtype = np.dtype(dtype)
    info = ml_dtypes.finfo if dtype == ml_dtypes.bfloat16 else np.finfo
    return float(info(dtype).eps)


def tolerance(dtype, reduced: int, roundings: float = 1) -> float:
    """Largest admissible error, relative to the largest value of the array.

    A sum of `reduced` terms of random sign in float32 makes a random walk of rounding errors: each
    partial sum of size sqrt(i) is rounded by at most eps/2, so the error of a sum of size sqrt(n)
    is about eps * sqrt(n) / 3, and the largest of a million entries some 5 deviations of that: 4
    covers it and the same again for a reduction over devices in another order. To it comes, for
    each value that has to be stored in `dtype` on the way, a rounding of at most eps(dtype)/2,
    here with a factor 2 to spare. Accumulating in bfloat16 instead would be a random walk of
    eps(bfloat16), 65536 times as long: it fails.
    """
    return roundings * epsilon(dtype) + 4 * FLOAT32_EPSILON * max(reduced, 1) ** 0.5


def error(got, want) -> float:
    """Largest difference, relative to the largest value wanted."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, wanted {want.shape}"
    if want.size == 0:
        return 0.0
    if not np.isfinite(got).all():
        return float("inf")
    worst = float(np.abs(got - want).max())
    largest = float(np.abs(want).max())
    return worst / largest if largest else (0.0 if worst == 0 else float("inf"))


def assert_close(
    got, want, *, reduced: int, dtype=None, roundings: float = 1, what: str = ""
) -> None:
    """`got` is `want` but for rounding to `dtype`: that of `got` where none is given."""
    limit = tolerance(got.dtype if dtype is None else dtype, reduced, roundings)
    worst = error(got, want)
    assert worst <= limit, f"{what}: relative error {worst:.3g}, tolerance {limit:.3g}"


def assert_shards_close(
    got: jax.Array, want, *, reduced: int, roundings: int = 1, what: str = ""
) -> None:
    """As assert_close, on every device: replicas that differ would hide behind the first one."""
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    largest = float(np.abs(want).max(initial=0))
    limit = tolerance(got.dtype, reduced, roundings) * largest
    for shard in got.addressable_shards:
        values = np.asarray(shard.data).astype(np.float64)
        worst = np.abs(values - want[shard.index]).max(initial=0)
        assert worst <= limit, (  # a NaN fails too
            f"{what}: error {worst:.3g} on {shard.device}, tolerance {limit:.3g}"
        )
