"""One kernel launch as one XLA custom call.

The compiled kernel and its launch shape are attributes of the call, so a serialised executable
carries its kernels and needs no compiler where it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from shardops.kernels import compile, library, target

MAX_GRID = 2**31 - 1  # blocks along x
_TARGET_NAME = "shardops_launch"


@dataclass(frozen=True)
class Kernel:
    """One specialisation of a device function.

    Args:
      file: source file in csrc/kernels.
      name: the function's (unmangled) symbol.
      constants: macros that the source is specialised by.
    """

    file: str
    name: str
    constants: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Launch:
    """A kernel and the shape it is launched in.

    Args:
      shared_bytes: dynamic shared memory of a block.
      zeroed: indices of results that are set to zero before the launch.
      early: it may start before what precedes it on the stream has ended; its kernel waits for that
        before it reads or writes. Of sm_90 and newer.
      align: what the kernel takes each address for a multiple of, in bytes; arrays that lie
        elsewhere are copied, before and after the launch.
      resident: its blocks wait for each other, so all of them run at the same time.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    zeroed: tuple[int, ...] = ()
    early: bool = False
    align: int = 1
    resident: bool = False


def begin(launches: Sequence[Launch]) -> None:
    """Gets kernels that are called soon, at the same time, while another is called."""
    arch = target.current_target().arch
    for kernel in (launch.kernel for launch in launches):
        compile.begin(kernel.file, kernel.name, kernel.constants, arch)


def call(
    launch: Launch,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    scalars: Sequence[np.generic] = (),
    layouts: Sequence[Sequence[int] | None] | None = None,
) -> tuple[jax.Array, ...]:
    """Launches a kernel whose parameters are the operands, the results, the scalars, in order.

    Args:
      layouts: of the results, where they are not row-major: dims from major to minor.
    """
    library.core()  # registers the custom call's target
    kernel = launch.kernel
    cubin = compile.cubin(kernel.file, kernel.name, kernel.constants, target.current_target().arch)
    packed = b"".join(scalar.tobytes() for scalar in scalars)
    outputs = jax.ffi.ffi_call(_TARGET_NAME, tuple(results), output_layouts=layouts)(
        *operands,
        cubin=np.frombuffer(cubin, np.uint8),
        name=kernel.name,
        grid=np.array(launch.grid, np.int64),
        block=np.array(launch.block, np.int64),
        cluster=np.array(launch.cluster, np.int64),
        shared_bytes=np.int64(launch.shared_bytes),
        scalars=np.frombuffer(packed, np.uint8),
        sizes=np.array([scalar.nbytes for scalar in scalars], np.int64),
        zeroed=np.array(launch.zeroed, np.int64),
        early=np.int64(launch.early),
        align=np.int64(launch.align),
        resident=np.int64(launch.resident),
    )
    return tuple(outputs)
