"""The custom call "shardops_launch", on XLA:CPU and a stand-in driver with kernels of its own."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardops.kernels import compile, launch
from shardops.kernels.target import target_for, use_target

CUBIN = np.frombuffer(b"FAKE: axpy shape three\0", np.uint8)  # see tests/cpp/fake_cuda.cc
SHAPE = {
    "grid": np.array([4, 3, 2], np.int64),
    "block": np.array([32, 2, 1], np.int64),
    "cluster": np.array([2, 1, 1], np.int64),
    "shared_bytes": np.int64(100 << 10),
}


def packed(*scalars: np.generic) -> dict[str, np.ndarray]:
    return {
        "scalars": np.frombuffer(b"".join(s.tobytes() for s in scalars), np.uint8),
        "sizes": np.array([s.nbytes for s in scalars], np.int64),
    }


def call(
    kernel: str, results: list[Any], *operands: jax.Array, **attributes: Any
) -> list[jax.Array]:
    full = {"cubin": CUBIN, "name": kernel, **SHAPE, **packed(), "zeroed": np.zeros(0, np.int64)}
    full = {k: v for k, v in {**full, **attributes}.items() if v is not None}
    return jax.jit(lambda *a: jax.ffi.ffi_call("shardops_launch", results)(*a, **full))(*operands)


def test_launch_passes_operands_results_and_scalars(
    core: ModuleType, rng: np.random.Generator
) -> None:
    x, y = (jnp.asarray(rng.standard_normal(33), jnp.float32) for _ in range(2))
    result = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    before = core.counters()
    (out,) = call(
        "axpy", result, x, y, zeroed=np.zeros(1, np.int64), **packed(np.float32(2.5), np.int32(33))
    )
    np.testing.assert_allclose(out, 2.5 * x + y, rtol=1e-6)
    assert core.counters()["kernels_launched"] == before["kernels_launched"] + 1


def test_launch_shape(core: ModuleType) -> None:
    (out,) = call("shape", [jax.ShapeDtypeStruct((10,), jnp.int32)])
    assert out.tolist() == [4, 3, 2, 32, 2, 1, 2, 1, 1, 100 << 10]


def test_launch_loads_a_cubin_once(core: ModuleType) -> None:
    cubin = np.frombuffer(b"FAKE: shape, of this test alone\0", np.uint8)
    before = core.counters()["cubins_loaded"]
    for blocks in (1, 2, 3):
        (out,) = call(
            "shape",
            [jax.ShapeDtypeStruct((10,), jnp.int32)],
            cubin=cubin,
            grid=np.array([2 * blocks, 1, 1], np.int64),
        )
        assert out[0] == 2 * blocks
    assert core.counters()["cubins_loaded"] == before + 1


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"grid": None}, "attribute 'grid' is missing; expected an int64 array."),
        ({"grid": np.array([1, 1], np.int64)}, "'grid' is 2 integers long; expected 3 integers."),
        ({"block": np.array([1, 1, 1], np.int32)}, "'block' is of another type; expected an int64"),
        ({"cubin": "text"}, "attribute 'cubin' is of another type; expected a uint8 array."),
        ({"name": np.int64(1)}, "attribute 'name' is of another type; expected a string."),
        ({"shared_bytes": np.float32(1)}, "'shared_bytes' is of another type; expected an int64."),
        ({"name": "absent"}, "the cubin has no kernel 'absent'."),
        ({"zeroed": np.array([1], np.int64)}, "'zeroed' is 1; expected the index of one of 1 res"),
    ],
)
def test_launch_refuses(core: ModuleType, change: dict[str, Any], want: str) -> None:
    with pytest.raises(Exception, match="shardops_launch") as caught:
        jax.block_until_ready(call("shape", [jax.ShapeDtypeStruct((10,), jnp.int32)], **change))
    assert want in str(caught.value)


def test_launch_call_of_the_package(
    core: ModuleType, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kernels.launch.call` says what the handler understands."""
    monkeypatch.setattr(compile, "cubin", lambda *_: CUBIN.tobytes())
    kernel = launch.Kernel("axpy.cuh", "axpy", ())
    shape = launch.Launch(kernel, grid=(1, 1, 1), block=(32, 1, 1), zeroed=(0,))
    x, y = (jnp.asarray(rng.standard_normal(7), jnp.float32) for _ in range(2))

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        (out,) = launch.call(shape, (x, y), (result,), (np.float32(-1), np.int32(7)))
        return out

    with use_target(target_for("sm_90", 132)):
        np.testing.assert_allclose(jax.jit(run)(x, y), y - x, rtol=1e-6)
