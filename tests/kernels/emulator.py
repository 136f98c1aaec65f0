"""Runs a planned kernel on the host, from the same source that NVRTC compiles."""

import ctypes
import pathlib
import re
import shutil
import subprocess

import numpy as np

from shardops.kernels import compile
from shardops.kernels.launch import Launch

_SHIM = pathlib.Path(__file__).with_name("cuda_on_host.h")
_COMPILER = shutil.which("g++")
# Misaligned accesses print to stderr; the tests look for it.
_FLAGS = [
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-w",
    "-fsanitize=alignment",
    "-ffp-contract=off",
]
# Sources that cuda_on_host.h and what it includes stand in for.
_PTX = ("ptx.cuh", "async.cuh", "group_ptx.cuh", "quantize_ptx.cuh")
_DYNAMIC_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) ([\w ]+) (\w+)\[\];")

reason_missing = None if _COMPILER else "no g++ on PATH to build the kernels for the host with"


def run(
    launch: Launch,
    directory: pathlib.Path,
    operands: list[np.ndarray],
    results: list[np.ndarray],
    scalars: list[np.generic],
) -> None:
    """Launches on host memory: `results` are written in place.

    Arrays that do not lie where the kernel wants them are copied, as csrc/aligned_copies.cc has it.
    """
    library = _built(launch, directory)
    arrays = [_placed(array, launch.align) for array in (*operands, *results)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    packed = [np.asarray(scalar) for scalar in scalars]
    addresses = [ctypes.addressof(pointer) for pointer in pointers]
    addresses += [scalar.ctypes.data for scalar in packed]
    grid, block = ((ctypes.c_uint * 3)(*shape) for shape in (launch.grid, launch.block))
    assert launch.cluster[1:] == (1, 1)
    broken = library.emulate(
        grid,
        block,
        ctypes.c_uint(launch.grid[0] if launch.resident else launch.cluster[0]),
        ctypes.c_long(launch.shared_bytes),
        (ctypes.c_void_p * len(addresses))(*addresses),
    )
    assert broken == 0, f"{launch.kernel.name}: its threads wait for each other"
    for result, written in zip(results, arrays[len(operands) :], strict=True):
        if written is not result:
            result[...] = written


def _placed(array: np.ndarray, align: int) -> np.ndarray:
    if array.ctypes.data % align == 0:
        return array
    memory = np.empty(array.nbytes + align, np.uint8)
    start = -memory.ctypes.data % align
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _built(launch: Launch, directory: pathlib.Path) -> ctypes.CDLL:
    kernel = launch.kernel
    text = compile.source_text(kernel.file, kernel.constants, leave_out=_PTX)
    text = _DYNAMIC_SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(dynamic_shared);", text)
    source = directory / f"{kernel.name}-{abs(hash(kernel)):x}.cc"
    library = source.with_suffix(".so")
    if not library.exists():
        source.write_text(
            f'#include "{_SHIM}"\n{text}\n'
            'extern "C" int emulate(const Index* grid, const Index* block, unsigned cluster,\n'
            "                       long shared_bytes, void** arguments) {\n"
            f"  return host::launch({kernel.name}, *grid, *block, cluster, shared_bytes,\n"
            "                      arguments);\n}\n"
        )
        assert _COMPILER is not None
        subprocess.run([_COMPILER, *_FLAGS, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
