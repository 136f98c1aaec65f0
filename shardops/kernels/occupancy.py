"""How many clusters of blocks a GPU runs at once, asked of its driver.

A cluster lies in one part of the GPU (a GPC), and which multiprocessors of a part are switched off
differs between single GPUs of a kind: so the number follows from nothing but the question.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from shardops.errors import KernelUnavailableError
from shardops.kernels import library

# A kernel that does nothing, which the driver itself compiles: no NVRTC, no cubin for each GPU.
_PROBE = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry probe() { ret; }
"""
_THREADS = 128
MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
NON_PORTABLE_CLUSTER = 14
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_INVALID_CLUSTER_SIZE = 912  # CUresult


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class _RefusedError(RuntimeError):
    """A function of the driver failed."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} returned {status}")
        self.status = status


@functools.cache
def active_clusters(ordinal: int, cluster: int, shared_bytes: int) -> int | None:
    """Clusters of so many blocks that run at once, each block with so much shared memory.

    Args:
      ordinal: of the device, as CUDA counts them.
    Returns: 0 where the device runs no such cluster; None where the driver does not tell.
    """
    try:
        driver = ctypes.CDLL(library.find_library("cuda"))
        with _context(driver, ordinal), _probe(driver) as function:
            _call(driver, "cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared_bytes)
            _call(driver, "cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER, 1)
            attribute = LaunchAttribute(id=CLUSTER_DIMENSION)
            attribute.value[:3] = (cluster, 1, 1)
            config = LaunchConfig(
                grid=(cluster, 1, 1),
                block=(_THREADS, 1, 1),
                shared_bytes=shared_bytes,
                attributes=ctypes.pointer(attribute),
                attribute_count=1,
            )
            found = ctypes.c_int()
            asked = ctypes.byref(found), function, ctypes.byref(config)
            _call(driver, "cuOccupancyMaxActiveClusters", *asked)
    except KernelUnavailableError:
        return None
    except _RefusedError as error:
        return 0 if error.status == _INVALID_CLUSTER_SIZE else None
    return found.value


@contextmanager
def _context(driver: ctypes.CDLL, ordinal: int) -> Iterator[None]:
    """Makes the device's primary context, which is JAX's, current."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call(driver, "cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


@contextmanager
def _probe(driver: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call(driver, "cuModuleLoadData", ctypes.byref(module), _PROBE)
    try:
        _call(driver, "cuModuleGetFunction", ctypes.byref(function), module, b"probe")
        yield function
    finally:
        driver.cuModuleUnload(module)


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    if status != 0:
        raise _RefusedError(name, status)
