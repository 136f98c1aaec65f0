"""Takes kernels in several processes at once: `python -m tests.kernels.take_kernels '[{...}, …]'`.

One process for each environment (a variable of null is unset), forked from one that has imported
the package and nothing of CUDA's; all start together, and a directory's mode binds each of them, be
it root's. Prints as JSON what each saw.
"""

import ctypes
import hashlib
import json
import os
import sys
import time
import traceback
import warnings

from shardops import config
from shardops.kernels import compile, library, packing
from shardops.kernels.families import Request

ARCH = "sm_90"
KERNELS = packing.kernels_of(Request("rms_norm", 64, "bfloat16", ("backward",)), ARCH)[:2]


def take() -> dict[str, object]:
    digests, times = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kernel in KERNELS:
            start = time.perf_counter()
            code = compile.cubin(kernel.file, kernel.name, kernel.constants, ARCH)
            times.append(1e3 * (time.perf_counter() - start))
            digests.append(hashlib.sha256(code).hexdigest())
    return {
        "counts": vars(compile.counts),
        "digests": digests,
        "warnings": [str(warning.message) for warning in caught],
        "loaded": bool(library.loaded("nvrtc")),
        "times": times,
    }


def obey_modes() -> None:
    """Root may write where no mode allows it, by a capability: this process gives that up."""
    libc = ctypes.CDLL(None, use_errno=True)
    version_and_pid = (ctypes.c_uint32 * 2)(0x20080522, 0)  # Linux's capabilities of 64 bits
    effective_first = (ctypes.c_uint32 * 6)()
    assert libc.capget(version_and_pid, effective_first) == 0
    effective_first[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE
    assert libc.capset(version_and_pid, effective_first) == 0


def child(environment: dict[str, str | None], ready: int, go: int, results: int) -> None:
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    obey_modes()
    config.get.cache_clear()  # the parent has planned the kernels, in its own environment
    os.write(ready, b".")
    os.read(go, 1)  # until the parent closes its end
    try:
        result = take()
    except BaseException:
        result = {"error": traceback.format_exc()}
    with os.fdopen(results, "w") as file:
        json.dump(result, file)


def main() -> None:
    ready, says_ready = os.pipe()
    go, starts = os.pipe()
    pipes, children = [], []
    for environment in json.loads(sys.argv[1]):
        mine, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(starts)
            child(environment, says_ready, go, theirs)
            os._exit(0)
        os.close(theirs)
        pipes.append(mine)
        children.append(pid)
    for _ in children:
        os.read(ready, 1)
    os.close(starts)
    print(json.dumps([json.load(os.fdopen(pipe)) for pipe in pipes]))
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
