"""Launches compiled kernels through the driver and times them: for sweeps over many candidates.

No XLA in between, so a candidate costs a module load and a few launches, and nothing else runs on
the device meanwhile.
"""

import contextlib
import ctypes
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardops.kernels import library
from shardops.kernels.launch import Launch
from shardops.kernels.occupancy import (
    CLUSTER_DIMENSION,
    MAX_DYNAMIC_SHARED,
    NON_PORTABLE_CLUSTER,
    LaunchAttribute,
    LaunchConfig,
)

_COOPERATIVE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_PORTABLE_CLUSTER = 8
_NON_BLOCKING = 1
_RELAXED_CAPTURE = 2
_STICKY = (700, 702, 714, 715, 716, 717, 718, 719)  # illegal accesses and the like


class LaunchError(RuntimeError):
    """The driver refused a launch; later ones may be fine."""


class Device:
    """The driver, in the context that JAX made current."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(library.find_library("cuda"))
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)
        self._events = [ctypes.c_void_p() for _ in range(2)]
        for event in self._events:
            self.call("cuEventCreate", ctypes.byref(event), 0)

    def microseconds(self, run: Callable[[], None], count: int, graph: bool = False) -> float:
        """The time of one of `count` calls of `run`, which only launches.

        Args:
          graph: as a CUDA graph, for kernels that take less time than Python to launch them.
        """
        run()

        def times() -> None:
            for _ in range(count):
                run()

        if not graph:
            return self._elapsed(times) / count
        with self._recorded(times) as replay:
            return self._elapsed(replay) / count

    def _elapsed(self, work: Callable[[], None]) -> float:
        start, end = self._events
        self.call("cuEventRecord", start, self.stream)
        work()
        self.call("cuEventRecord", end, self.stream)
        self.call("cuEventSynchronize", end)
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value * 1e3

    @contextlib.contextmanager
    def _recorded(self, work: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """What launches all that `work` does as one graph, and has done so once."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, _RELAXED_CAPTURE)
        work()
        self.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        try:
            self.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
            self.call("cuGraphLaunch", ready, self.stream)
            yield lambda: self.call("cuGraphLaunch", ready, self.stream)
        finally:
            if ready:
                self.call("cuGraphExecDestroy", ready)
            self.call("cuGraphDestroy", graph)

    def poison(self, array: jax.Array) -> None:
        """NaN everywhere, so that what a launch does not write shows."""
        self.fill(array, 0xFF)

    def fill(self, array: jax.Array, byte: int) -> None:
        start = ctypes.c_uint64(array.unsafe_buffer_pointer())
        self.call("cuMemsetD8Async", start, byte, ctypes.c_size_t(array.nbytes), self.stream)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status in _STICKY:  # the context is lost
            raise RuntimeError(f"{name} returned {status}: a kernel went wrong")
        if status != 0:
            raise LaunchError(f"{name} returned {status}")


def numbers(role: str, count: int, dtype: str) -> jax.Array:
    """At least so many random numbers in a row, the same array for the same role and size.

    Problems of one size share them, so that a run over many row lengths draws once.
    """
    return _numbers(role, 1 << (count - 1).bit_length(), dtype)


@functools.cache
def _numbers(role: str, count: int, dtype: str) -> jax.Array:
    key = jax.random.key(zlib.crc32(role.encode()))
    return jax.block_until_ready(jax.random.normal(key, count, jnp.dtype(dtype)))


class Call:
    """A launch with its arguments, ready to go on the device's stream."""

    def __init__(
        self,
        device: Device,
        launch: Launch,
        cubin: bytes,
        arrays: Sequence[jax.Array],
        scalars: Sequence[np.generic],
        zeroed: Sequence[jax.Array] = (),
    ):
        self._device, self._arrays, self._zeroed = device, arrays, zeroed
        self._function = _loaded(device, launch, cubin)
        pointers = [ctypes.c_void_p(array.unsafe_buffer_pointer()) for array in arrays]
        self._values = [*pointers, *(np.asarray(scalar) for scalar in scalars)]
        addresses = [
            ctypes.addressof(v) if isinstance(v, ctypes.c_void_p) else v.ctypes.data
            for v in self._values
        ]
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        found = []
        if launch.cluster != (1, 1, 1):
            found.append(LaunchAttribute(id=CLUSTER_DIMENSION))
            found[-1].value[:3] = launch.cluster
        if launch.early:
            found.append(LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION))
            found[-1].value[0] = 1
        if launch.resident:
            found.append(LaunchAttribute(id=_COOPERATIVE))
            found[-1].value[0] = 1
        self._attributes = (LaunchAttribute * len(found))(*found)
        self._config = LaunchConfig(
            (ctypes.c_uint * 3)(*launch.grid),
            (ctypes.c_uint * 3)(*launch.block),
            launch.shared_bytes,
            device.stream,
            self._attributes,
            len(found),
        )

    def __call__(self) -> None:
        for array in self._zeroed:
            self._device.fill(array, 0)
        config = ctypes.byref(self._config)
        self._device.call("cuLaunchKernelEx", config, self._function, self._parameters, None)


@functools.cache
def _loaded(device: Device, launch: Launch, cubin: bytes) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    device.call("cuModuleLoadData", ctypes.byref(module), cubin)
    name = launch.kernel.name.encode()
    device.call("cuModuleGetFunction", ctypes.byref(function), module, name)
    if launch.shared_bytes > 48 << 10:
        device.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, launch.shared_bytes)
    if launch.cluster[0] > _PORTABLE_CLUSTER:
        device.call("cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER, 1)
    return function
