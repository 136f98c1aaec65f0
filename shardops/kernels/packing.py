"""Packs: which kernels a request needs, filling a directory with them, and what is missing."""

import itertools
import math
import os
import pathlib
import shlex
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from shardops.kernels import compile
from shardops.kernels.cache import KernelDirectory
from shardops.kernels.families import DTYPES, FAMILIES, OPTIONS, PASSES, Request
from shardops.kernels.launch import Kernel
from shardops.kernels.sizes import SM_COUNTS
from shardops.kernels.target import PORTABLE_CLUSTER, Target, has_room, target_for

# A plan may choose its constants by the rows and by the multiprocessors that are free, not by the
# grid alone. It does so by thresholds, and by what divides the rows: one of these is in each case.
_ROWS = tuple(sorted({2**power + odd for power in range(32) for odd in (0, 1)}))
_MOST_AT_ONCE = 16  # compilations, of some hundred MB each
_USUAL = ((8192, 132), (1, 132), (8192, 4), (2**31, 132))  # rows and multiprocessors
_USUAL_SLICES = ((8192, 16), (1, 16))
_OWN = {name for family in FAMILIES.values() for name in family.own}  # looked for there alone
# Requests that are planned for all rows, of those whose usual plan is nearest to what is missing.
_NEAREST = 8


@dataclass(frozen=True)
class Built:
    """A kernel of a pack; `seconds` is None where the pack had it."""

    about: dict[str, Any]
    seconds: float | None


def kernels_of(
    request: Request, arch: str, rows: int | None = None, sm_count: int | None = None
) -> list[Kernel]:
    """Returns the kernels that serve a request: for any rows, on a GPU of any size, or for those.

    Of a GPU that may lack room for clusters of more blocks than are portable, those are there too
    that it takes then.

    Args:
      arch: "sm_90".
    """
    all_rows = _ROWS if rows is None else (rows,)
    sm_counts = SM_COUNTS if sm_count is None else (sm_count,)
    launches = FAMILIES[request.op].launches
    found: dict[Kernel, None] = {}  # a set that keeps the order
    for count, sms in itertools.product(all_rows, sm_counts):
        target = target_for(arch, sms)
        planned = launches(request, count, target)
        widest = max((math.prod(launch.cluster) for launch in planned), default=1)
        if widest > PORTABLE_CLUSTER and not has_room(widest, sms):
            planned = [*planned, *launches(request, count, _of_portable_clusters(target))]
        found |= dict.fromkeys(launch.kernel for launch in planned)
    return list(found)


def _of_portable_clusters(target: Target) -> Target:
    return replace(target, largest_cluster=PORTABLE_CLUSTER)


def build(kernels: Sequence[Kernel], arch: str, directory: KernelDirectory) -> Iterator[Built]:
    """Compiles what a pack lacks, on the cores that it may use, and tells of each kernel in order.

    Raises: ValueError where a directory has the name of a kernel, OSError where the pack cannot be
      written, KernelUnavailableError without a compiler.
    """
    stored = {entry.path.stem: entry.about for entry in directory.entries()}
    keys = {
        compile.key_of(kernel.file, kernel.name, kernel.constants, arch): kernel
        for kernel in kernels
    }
    for key in keys:  # before any is compiled
        path = directory.path / f"{key}.kernel"
        if path.is_dir():
            raise ValueError(f"{path} is a directory; expected a kernel, or nothing. Remove it.")
    pool = ThreadPoolExecutor(min(_MOST_AT_ONCE, len(os.sched_getaffinity(0))))
    try:
        lacking = {key: kernel for key, kernel in keys.items() if stored.get(key) is None}
        compiled = {key: pool.submit(_compiled, kernel, arch) for key, kernel in lacking.items()}
        for key in keys:
            about, seconds = stored.get(key), None
            if about is None:
                code, about, seconds = compiled[key].result()
                directory.store(key, code, about)
            yield Built(about, seconds)
    finally:  # also where no more are asked for
        pool.shutdown(cancel_futures=True)


def _compiled(kernel: Kernel, arch: str) -> tuple[bytes, dict[str, Any], float]:
    start = time.perf_counter()
    code, about = compile.compile_kernel(kernel.file, kernel.name, kernel.constants, arch)
    return code, about, time.perf_counter() - start


def missing(
    pack: pathlib.Path | None, file: str, name: str, constants: compile.Constants, arch: str
) -> str:
    """Words the error for a kernel that no pack has: which it is, and what builds it."""
    kernel = Kernel(file, name, constants)
    request = request_for(kernel, arch)
    out, build = "PACK" if pack is None else str(pack), "Build"
    if pack is None:
        where = "SHARDOPS_KERNEL_PACK is not set"
    elif not pack.is_dir():
        where = no_directory(pack)
        build = "Correct SHARDOPS_KERNEL_PACK, or build"
    elif (path := pack / f"{compile.key_of(file, name, constants, arch)}.kernel").exists():
        where = f"its file in the pack, {path}, is damaged or cannot be read"
    else:
        where = f"it is not in the pack {pack}"
    if request is None:
        listed = ", ".join(f"{constant}={value}" for constant, value in constants)
        which = f"{name} ({listed}) for {arch}"
        fix = f"{build} its pack by `python -m shardops kernels build` of the same version"
    else:
        which = f"{name} ({_words(request)}) for {arch}"
        fix = f"{build} it: {command_for(request, arch, out)}"
    return (
        f"kernels: {which} is missing: {where}{_otherwise(pack, kernel, arch)}, and "
        f"SHARDOPS_NVRTC=0 forbids compiling it. {fix}; or unset SHARDOPS_NVRTC."
    )


def command_for(request: Request, arch: str, out: str) -> str:
    """The command line, for a shell, that builds what a request needs."""
    words = ["python -m shardops kernels build", f"--arch {arch}", f"--op {request.op}"]
    words += [f"--rows-length {request.length}", f"--dtype {request.dtype}"]
    for name, value in request.options:
        words.append(flag(name) if value == OPTIONS[name].bare else f"{flag(name)} {value}")
    if request.passes != PASSES:
        words += [f"--{direction}" for direction in request.passes]
    return " ".join([*words, f"--out {shlex.quote(out)}"])


def no_directory(pack: pathlib.Path) -> str:
    """Says what is wrong with a SHARDOPS_KERNEL_PACK that is not a directory."""
    what = "which is no directory" if os.path.lexists(pack) else "which does not exist"
    return f"SHARDOPS_KERNEL_PACK is {pack}, {what}"


def flag(option: str) -> str:
    """The option's flag on the command line."""
    return "--" + option.replace("_", "-")


def request_for(kernel: Kernel, arch: str) -> Request | None:
    """Returns the request with the fewest options whose pack has this kernel; None if none has.

    Plans are pure functions, so their results are compared: there is no second account of what a
    constant means.
    """
    near: list[tuple[tuple[int, int], Request]] = []
    usual = [(rows, target_for(arch, sms)) for rows, sms in _USUAL]
    usual += [(rows, _of_portable_clusters(target_for(arch, sms))) for rows, sms in _USUAL_SLICES]
    for length in _lengths(kernel):
        for request in _requests(length, kernel.name):
            plan = FAMILIES[request.op].launches
            planned = [one.kernel for at in usual for one in plan(request, *at)]
            if kernel in planned:
                return request
            likeness = max((_likeness(kernel, other) for other in planned), default=(0, 0))
            near.append((likeness, request))
    near.sort(key=lambda item: item[0], reverse=True)  # stable: the fewest options stay first
    for _, request in near[:_NEAREST]:
        if kernel in kernels_of(request, arch):
            return request
    return None


def _likeness(one: Kernel, other: Kernel) -> tuple[int, int]:
    """How many of the constants agree from the first on, which are the problem's; how many
    words of the names, which tell op and pass."""
    constants = _alike(one.constants, other.constants)
    return constants, _alike(one.name.split("_"), other.name.split("_"))


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long two sequences are the same."""
    agree = [a == b for a, b in zip(one, other, strict=False)]
    return [*agree, False].index(False)


def _lengths(kernel: Kernel) -> list[int]:
    """What may be the row's length: the constant COLS in every family so far, else any."""
    constants = dict(kernel.constants)
    if "COLS" in constants:
        return [constants["COLS"]]
    # Kernels of any length: what counts is what divides it.
    return sorted({128, *(value for value in constants.values() if value > 0)}, reverse=True)


def _requests(length: int, kernel: str) -> list[Request]:
    found = []
    for op, family in FAMILIES.items():
        if (kernel in family.own) != (kernel in _OWN or bool(family.own)):
            continue
        choices = [[(name, value) for value in OPTIONS[name].values] for name in family.options]
        for chosen in itertools.product(*choices):
            options = tuple(pair for pair in chosen if pair[1] != OPTIONS[pair[0]].values[0])
            for direction, dtype in itertools.product(PASSES, DTYPES):
                found.append(Request(op, length, dtype, (direction,), options))
    return sorted(found, key=lambda request: len(request.options))


def _words(request: Request) -> str:
    options = "".join(f", {name} {value}" for name, value in request.options)
    passes = " and ".join(request.passes)
    return f"{passes} of {request.op}, rows of {request.length}, {request.dtype}{options}"


def _otherwise(pack: pathlib.Path | None, kernel: Kernel, arch: str) -> str:
    """Says so where the pack has this kernel, made of other sources."""
    if pack is not None:
        with suppress(OSError):
            for entry in KernelDirectory(pack, "").entries():
                about = entry.about or {}
                same = (about.get("kernel"), about.get("arch")) == (kernel.name, arch)
                if same and about.get("constants") == dict(kernel.constants):
                    of = f"other sources, or is a cache: shardops {about['shardops']}"
                    return f" (which has one of {of})"
    return ""
