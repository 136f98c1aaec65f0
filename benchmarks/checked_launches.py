"""Launches every kind of kernel on small arrays, for compute-sanitizer: scripts/sanitize.sh.

    python benchmarks/checked_launches.py build|kernels [--for-racecheck] [--share 1/4]
        [--only norm|softmax|shared|quantize|scales|products]
    python benchmarks/checked_launches.py overrun|race|gemm

kernels: norms, softmax, quantisation and scales as JAX would launch them, but without XLA, which is
slow under the sanitizer and packs its buffers into one allocation: here each array is one of its
own, so an access past its end is seen. Plans are those of a GPU of few multiprocessors, whose
blocks meet many tiles. Arrays hold NaN at first, and none may be left. --share: the cases are dealt
out, and these are the first of four shares. --for-racecheck: kernels are built so that each lane
arrives at the mbarriers that a warp arrives at (arrivals.cuh), and looks at them seldom while it
waits. build: compiles those kernels and launches none. overrun, race: an array is too short, or a
barrier is left out, which the sanitizer has to find. gemm: small products through XLA, whose
allocations are apart too.
"""

import argparse
import ctypes
import dataclasses
import itertools
import sys
from collections.abc import Sequence

import jax
import numpy as np

from checked_cases import CASES, run_norm, run_softmax
from compiling import compile_all
from raw_launch import Call, Device
from shardops.kernels import compile, launch
from shardops.kernels.launch import Kernel
from shardops.kernels.target import Target, target_for, use_target

SM_COUNT = 4
_RACECHECK = "FOR_RACECHECK"
Share = tuple[int, int]  # which, of how many
WORD = 16  # bytes: kernels read the words that an array's first and last element lie in


class DeviceArray:
    """An allocation of its own. `offset`: elements that it starts after a word."""

    def __init__(self, device: Device, values: np.ndarray, offset: int):
        self.shape, self.size, self.dtype = values.shape, values.size, values.dtype
        self._device = device
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
        self.for_racecheck = False
        self.short = False  # the last array has one element
        self.left_out = ""  # of the sources

    def array(self, values: np.ndarray) -> DeviceArray:
        offset = self.offset if values.itemsize == 2 else 0  # workspaces are float32 and lie well
        self.arrays.append(DeviceArray(self.device, values, offset))
        return self.arrays[-1]

    def __call__(
        self, what, operands, results, scalars=(), layouts=None
    ) -> tuple[DeviceArray, ...]:
        # Of arrays that lie elsewhere it would get copies: what it did where all begin with a word.
        known = self.offset > 0 and what.align == WORD
        outputs = []
        for index, result in enumerate(results):
            blank = 0 if index in what.zeroed else 1 if known else np.nan
            outputs.append(self.array(np.full(result.shape, blank, result.dtype)))
        if known:
            return tuple(outputs)
        arrays = [*operands, *outputs]
        if self.short:
            arrays[-1] = self.array(np.zeros(1, np.float32))
        kernel = built(what.kernel, self.for_racecheck)
        Call(self.device, what, self._code(kernel), arrays, scalars)()
        self.device.call("cuCtxSynchronize")
        self.count += 1
        return tuple(outputs)

    def _code(self, kernel: Kernel) -> bytes:
        if self.left_out:
            text = compile.source_text(kernel.file, kernel.constants).replace(self.left_out, "")
            return compile.compile_text(text, kernel.name, self.target.arch)[0]
        return compile.cubin(kernel.file, kernel.name, kernel.constants, self.target.arch)

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

    def __call__(
        self, what, operands, results, scalars=(), layouts=None
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        self.kernels[what.kernel] = None
        return tuple(results)

    def finish(self, case: str) -> None:
        pass


def built(kernel: Kernel, for_racecheck: bool) -> Kernel:
    if not for_racecheck or _RACECHECK not in compile.source_text(kernel.file, kernel.constants):
        return kernel
    return dataclasses.replace(kernel, constants=(*kernel.constants, (_RACECHECK, 1)))


def build(only: str | None, share: Share, for_racecheck: bool) -> None:
    """Into the cache on disk."""
    target, planned = target_for("sm_90", SM_COUNT), Planned()
    run_all(planned, target, only, share)
    compile_all((built(kernel, for_racecheck) for kernel in planned.kernels), target.arch)


def kernels(only: str | None, share: Share, for_racecheck: bool) -> None:
    launches = Launches(Device(), target_for("sm_90", SM_COUNT))
    launches.for_racecheck = for_racecheck
    run_all(launches, launches.target, only, share)
    print(f"checked_launches: {launches.count} launches, every result written")


def run_all(
    launches: Launches | Planned, target: Target, only: str | None, share: Share = (1, 1)
) -> None:
    launch.call = launches
    rng = np.random.default_rng(0)
    with use_target(target):
        for name, (cases, run) in CASES.items():
            wanted = cases() if only in (None, name) else ()
            for case in itertools.islice(wanted, share[0] - 1, None, share[1]):
                for offset in (0, 1) if "bfloat16" in case else (0,):
                    launches.offset = offset
                    run(launches, rng, *case)
                    launches.finish(f"{name} {case}, {offset} elements after a word")


def overrun() -> None:
    launches = Launches(Device(), target_for("sm_90", SM_COUNT))
    launch.call, launches.short = launches, True
    with use_target(launches.target):
        run_norm(launches, np.random.default_rng(0), 64, 256, "float32", "rms", False)


def race() -> None:
    launches = Launches(Device(), target_for("sm_90", SM_COUNT))
    launch.call, launches.left_out = launches, "__syncthreads();"
    with use_target(launches.target):
        run_softmax(launches, np.random.default_rng(0), (2, 33, 4096), "bfloat16", "none")


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


def share_of(text: str) -> Share:
    part, parts = map(int, text.split("/"))
    return part, parts


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    alone = {"overrun": overrun, "race": race, "gemm": gemm}
    parser.add_argument("what", choices=("build", "kernels", *alone))
    parser.add_argument("--only", choices=tuple(CASES))
    parser.add_argument("--share", type=share_of, default=(1, 1))
    parser.add_argument("--for-racecheck", action="store_true")
    options = parser.parse_args(arguments)
    if options.what in alone:
        alone[options.what]()
    else:
        run = build if options.what == "build" else kernels
        run(options.only, options.share, options.for_racecheck)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
