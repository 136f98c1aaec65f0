"""Launches every kind of kernel on small arrays, for compute-sanitizer: scripts/sanitize.sh.

    python benchmarks/checked_launches.py kernels [--only norm|softmax] [--no-mbarriers]
    python benchmarks/checked_launches.py planted|gemm

kernels: norms and softmax as JAX would launch them, but without XLA, which is slow under the
sanitizer and packs its buffers into one allocation: here each array is one of its own, so an access
past its end is seen. Plans are those of a GPU of few multiprocessors, whose blocks meet many tiles.
Arrays hold NaN at first, and none may be left. --no-mbarriers: without the kernels that hand shared
memory over by mbarriers, each of which racecheck takes for a race. planted: an array is too short,
which the sanitizer has to find. gemm: small products through XLA, whose allocations are apart too.
"""

import argparse
import concurrent.futures
import ctypes
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence

import jax
import ml_dtypes
import numpy as np

from raw_launch import Call, Device
from shardops.kernels import compile, launch, norm, softmax
from shardops.kernels.launch import Kernel
from shardops.kernels.target import Target, target_for, use_target

# Rows in registers, in tiles, streamed, over clusters and read in pieces; odd ones among them.
LENGTHS = (33, 1000, 1001, 1536, 4096, 20480, 65536, 262144, 1048576)
FLOAT32_LENGTHS = (33, 1536, 20480)
ELEMENTS = 1 << 19  # of an array, at most
SM_COUNT = 4
WORD = 16  # bytes: kernels read the words that an array's first and last element lie in


class DeviceArray:
    """An allocation of its own. `offset`: elements that it starts after a word."""

    def __init__(self, device: Device, values: np.ndarray, offset: int):
        self.shape, self.dtype, self._device = values.shape, values.dtype, device
        self._lead = offset * values.itemsize
        self._base = ctypes.c_void_p()
        size = -(-(self._lead + values.nbytes) // WORD) * WORD
        device.call("cuMemAlloc_v2", ctypes.byref(self._base), ctypes.c_size_t(size))
        host = np.ascontiguousarray(values)
        device.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_void_p(self.unsafe_buffer_pointer()),
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_size_t(host.nbytes),
        )

    def unsafe_buffer_pointer(self) -> int:
        return self._base.value + self._lead

    def values(self) -> np.ndarray:
        host = np.empty(self.shape, self.dtype)
        self._device.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_void_p(self.unsafe_buffer_pointer()),
            ctypes.c_size_t(host.nbytes),
        )
        return host

    def free(self) -> None:
        self._device.call("cuMemFree_v2", self._base)


class Launches:
    """Stands in for `launch.call`: launches at once, into arrays that held NaN."""

    def __init__(self, device: Device, target: Target):
        self.device, self.target = device, target
        self.arrays: list[DeviceArray] = []
        self.count = self.offset = 0
        self.mbarriers = True
        self.short = False  # the last array has one element

    def array(self, values: np.ndarray) -> DeviceArray:
        offset = self.offset if values.itemsize == 2 else 0  # workspaces are float32 and lie well
        self.arrays.append(DeviceArray(self.device, values, offset))
        return self.arrays[-1]

    def __call__(self, what, operands, results, scalars=()) -> tuple[DeviceArray, ...]:
        kernel = what.kernel
        launched = self.mbarriers or not has_mbarriers(kernel)
        outputs = []
        for index, result in enumerate(results):
            blank = np.nan if launched and index not in what.zeroed else 0
            outputs.append(self.array(np.full(result.shape, blank, result.dtype)))
        arrays = [*operands, *outputs]
        if self.short:
            arrays[-1] = self.array(np.zeros(1, np.float32))
        if launched:
            code = compile.cubin(kernel.file, kernel.name, kernel.constants, self.target.arch)
            Call(self.device, what, code, arrays, scalars)()
            self.device.call("cuCtxSynchronize")
            self.count += 1
        return tuple(outputs)

    def finish(self, case: str) -> None:
        """Looks at all arrays of a case and frees them."""
        for array in self.arrays:
            if array.dtype != np.bool_ and np.isnan(array.values().astype(np.float32)).any():
                raise RuntimeError(f"checked_launches: {case} left a NaN, or nothing, in an array")
            array.free()
        self.arrays.clear()


class Planned:
    """Stands in for it too: says which kernels there would be."""

    def __init__(self) -> None:
        self.kernels: dict[Kernel, None] = {}
        self.offset = 0

    def array(self, values: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(values.shape, values.dtype)

    def __call__(self, what, operands, results, scalars=()) -> tuple[jax.ShapeDtypeStruct, ...]:
        self.kernels[what.kernel] = None
        return tuple(results)

    def finish(self, case: str) -> None:
        pass


def has_mbarriers(kernel: Kernel) -> bool:
    """Whether it waits for one somewhere, beside the function that does."""
    return compile.source_text(kernel.file, kernel.constants).count("barrier_wait(") > 1


def norm_cases() -> Iterator[tuple]:
    """(rows, columns, dtype, kind, add): options take turns over lengths."""
    options = itertools.cycle(((True, "rms"), (False, "layer"), (False, "rms"), (True, "layer")))
    for cols, turns in zip(LENGTHS, itertools.cycle((2, 2, 3)), strict=False):
        rows = min(77, max(3, ELEMENTS // cols))
        for add, kind in itertools.islice(options, turns):
            yield rows, cols, "bfloat16", kind, add
        if cols in FLOAT32_LENGTHS:
            yield rows, cols, "float32", kind, add


def run_norm(launches: Launches | Planned, rng, rows, cols, dtype, kind, add) -> None:
    draw = _drawn(launches, rng, dtype)
    x, gamma = draw(rows, cols), draw(cols)
    beta = draw(cols) if kind == "layer" else None
    results = norm.norm_forward(
        x,
        gamma,
        beta,
        draw(rows, cols) if add else None,
        kind=kind,
        epsilon=1e-6,
        zero_centered_gamma=False,
    )
    norm.norm_backward(
        draw(rows, cols),
        x,
        gamma,
        results[-2] if kind == "layer" else None,
        results[-1],
        draw(rows, cols) if add else None,
        kind=kind,
        zero_centered_gamma=False,
        beta=kind == "layer",
    )


def softmax_cases() -> Iterator[tuple]:
    """((batch, queries, keys), dtype, what hides keys), turns taken likewise."""
    hidings = itertools.cycle(("none", "causal", "keys", "rows", "first"))
    for keys in LENGTHS:
        shape = (2, min(33, max(2, ELEMENTS // (2 * keys))), keys)
        for hiding in itertools.islice(hidings, 2):
            yield shape, "bfloat16", hiding
        if keys in FLOAT32_LENGTHS:
            yield shape, "float32", hiding


def run_softmax(launches: Launches | Planned, rng, shape, dtype, hiding) -> None:
    draw = _drawn(launches, rng, dtype)
    batch, queries, keys = shape
    mask = first = None
    if hiding in ("keys", "rows"):
        of = (batch, 1, keys) if hiding == "keys" else (1, queries, 1)
        mask = launches.array(rng.random(of) < 0.3)
    if hiding == "first":
        first = launches.array(np.int32([5])[0].reshape(()))
    diagonal = max(0, keys - queries) if hiding in ("causal", "first") else None
    y = softmax.softmax_forward(draw(*shape), mask, first, scale=0.125, diagonal=diagonal)
    softmax.softmax_backward(draw(*shape), y, first, scale=0.125, diagonal=diagonal)


def _drawn(launches: Launches | Planned, rng: np.random.Generator, dtype: str):
    of = np.dtype(np.float32 if dtype == "float32" else getattr(ml_dtypes, dtype))
    return lambda *shape: launches.array(rng.standard_normal(shape, np.float32).astype(of))


def kernels(only: str | None, mbarriers: bool) -> None:
    target = target_for("sm_90", SM_COUNT)
    planned = Planned()
    run_all(planned, target, only)
    wanted = [kernel for kernel in planned.kernels if mbarriers or not has_mbarriers(kernel)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
        list(pool.map(compiled, wanted, chunksize=4))  # into the cache on disk
    launches = Launches(Device(), target)
    launches.mbarriers = mbarriers
    run_all(launches, target, only)
    left_out = len(planned.kernels) - len(wanted)
    print(
        f"checked_launches: {launches.count} launches of {len(wanted)} kernels, every result "
        f"written{f'; {left_out} with mbarriers left out' if left_out else ''}"
    )


def run_all(launches: Launches | Planned, target: Target, only: str | None) -> None:
    launch.call = launches
    rng = np.random.default_rng(0)
    with use_target(target):
        for name, cases, run in (
            ("norm", norm_cases, run_norm),
            ("softmax", softmax_cases, run_softmax),
        ):
            for case in cases() if only in (None, name) else ():
                for offset in (0, 1) if "bfloat16" in case else (0,):
                    launches.offset = offset
                    run(launches, rng, *case)
                    launches.finish(f"{name} {case}, {offset} elements after a word")


def compiled(kernel: Kernel) -> None:
    compile.cubin(kernel.file, kernel.name, kernel.constants, "sm_90")


def planted() -> None:
    launches = Launches(Device(), target_for("sm_90", SM_COUNT))
    launch.call, launches.short = launches, True
    with use_target(launches.target):
        run_norm(launches, np.random.default_rng(0), 64, 256, "float32", "rms", False)


def gemm() -> None:
    import jax.numpy as jnp

    import shardops as so

    rng = np.random.default_rng(0)
    for m, n, k, dtype in (
        (64, 32, 64, "float32"),
        (77, 129, 33, "bfloat16"),
        (8, 8, 8, "float16"),
    ):
        lhs, rhs = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((m, k), (k, n)))
        bias = jnp.asarray(rng.standard_normal(n), dtype)

        def loss(lhs, rhs, bias):
            return so.gemm(lhs, rhs, bias=bias, activation="gelu").astype(jnp.float32).sum()

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(lhs, rhs, bias)
        if not all(np.isfinite(np.asarray(a, np.float32)).all() for a in (value, *gradients)):
            raise RuntimeError(f"checked_launches: gemm {m, n, k, dtype} is not finite")
    print("checked_launches: 3 products and their gradients, all finite")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("kernels", "planted", "gemm"))
    parser.add_argument("--only", choices=("norm", "softmax"))
    parser.add_argument("--no-mbarriers", dest="mbarriers", action="store_false")
    options = parser.parse_args(arguments)
    if options.what == "kernels":
        kernels(options.only, options.mbarriers)
    else:
        {"planted": planted, "gemm": gemm}[options.what]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
