"""Compiles many kernels at once, for sweeps."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterable
from functools import partial

from shardops.kernels import compile
from shardops.kernels.launch import Kernel


def compile_all(kernels: Iterable[Kernel], arch: str) -> dict[Kernel, bytes]:
    """On all cores, through the cache on disk. Processes are spawned: JAX should not be forked."""
    distinct = list(dict.fromkeys(kernels))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
        codes = pool.map(partial(code_of, arch=arch), distinct, chunksize=4)
        return dict(zip(distinct, codes, strict=True))


def code_of(kernel: Kernel, arch: str) -> bytes:
    return compile.cubin(kernel.file, kernel.name, kernel.constants, arch)
