"""Times the softmax kernels over row lengths, and with --sweep the launch shapes they could have.

    python benchmarks/softmax_times.py [--keys 1024,4096] [--shape 4,16,2048,2048]
        [--only forward|backward] [--kind plain,causal,masked,heads] [--dtype bfloat16]
        [--mib 128] [--rows N] [--raw] [--sweep] [--json FILE]

A time is kernel time (kernel_time.py), with --raw, and of a sweep's candidates, that of launches
back to back, gaps included; where few bytes move, over many sets of arrays and as a CUDA graph.
floor = the bytes that must move (softmax_runs.py) / the copy bandwidth of this run; fraction =
floor / time. A sweep compiles first, on all cores, and leaves out what is not right.
Needs a GPU: without one it lists the launch shapes.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from compiling import compile_all
from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import Kernel
from shardops.kernels.resident import Resident
from shardops.kernels.softmax_plan import Geometry
from shardops.kernels.target import target_for
from softmax_candidates import candidates
from softmax_runs import KINDS, SCALE, Case, RawRun, shape_of

KEYS = (16, 24, 33, 64, 127, 128, 256, 512, 768, 1000, 1001, 1024, 1536, 2048, 2880, 3000, 3001)
KEYS += (3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 20480, 32768, 65536, 262144, 1048576)
SETS = 4
GRAPH_BYTES = 64 << 20  # that move: of fewer, launches take longer than kernels
SMALL_SETS = 24  # of arrays, where so few bytes move that caches would hold one
CLOSE = {2: 1e-2, 4: 1e-5}  # to the largest number of a result, by bytes of an element
SHOWN = 4  # candidates of a case


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    target = target_for(options.arch, options.sm_count)
    jobs = [
        (case, geometry)
        for case in _cases(options)
        for geometry in candidates(case.problem, target, case.operands)[: options.limit]
    ]
    raw = options.sweep or options.raw
    launches = (launch for case, g in jobs for launch in case.plan(target, g).launches)
    cubins = compile_all((launch.kernel for launch in launches), target.arch) if raw else {}
    import jax

    from bench import copy_bandwidth

    on_gpu = jax.devices()[0].platform == "gpu"
    bandwidth = copy_bandwidth(2**30) if on_gpu else math.nan
    print(f"{jax.devices()[0].device_kind}: copy {bandwidth / 1e12:.3f} TB/s; {options.dtype}")
    found = []
    for case in dict.fromkeys(case for case, _ in jobs):
        geometries = [geometry for of, geometry in jobs if of == case]
        floor = case.bytes / bandwidth * 1e6
        if not on_gpu:
            entries = [{"geometry": geometry, "us": math.nan} for geometry in geometries]
        elif raw:
            entries = _swept(case, geometries, target, cubins)
        else:
            entries = [{"geometry": geometries[0], "us": _kernel_time(case)}]
        for entry in entries:
            entry |= {"chosen": entry["geometry"] == geometries[0], "fraction": floor / entry["us"]}
        best = sorted(entries, key=lambda entry: entry["us"])
        for entry in best if not on_gpu else _shown(best):
            _show(case, entry)
        found += [_plain(case, entry) for entry in entries]
    if options.json:
        facts = {"copy_bytes_per_second": bandwidth, "rows": found}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str]) -> Any:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=numbers, default=KEYS)
    parser.add_argument("--shape", type=numbers, action="append", help="in the place of --keys")
    parser.add_argument("--only", choices=("forward", "backward"))
    parser.add_argument("--kind", default="plain", help=",".join(KINDS))
    parser.add_argument("--dtype", choices=tuple(TYPE_BYTES), default="bfloat16")
    parser.add_argument("--mib", type=float, default=128, help="size of x")
    parser.add_argument("--rows", type=int, help="rows of x, in the place of --mib")
    parser.add_argument("--sweep", action="store_true", help="time all launch shapes")
    parser.add_argument("--raw", action="store_true", help="launches back to back, without XLA")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--sm-count", type=int, default=132)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="all that was timed")
    options = parser.parse_args(arguments)
    options.limit = None if options.sweep else 1
    return options


def _cases(options: Any) -> Iterator[Case]:
    for kind in options.kind.split(","):
        size = int(options.mib * 2**20) // TYPE_BYTES[options.dtype]
        shapes = options.shape or [
            shape_of(kind, options.rows or max(1, size // keys), keys) for keys in options.keys
        ]
        for shape in shapes:
            for direction in ("forward", "backward"):
                unlike = direction == "forward" or kind in ("plain", "causal")
                if options.only in (None, direction) and unlike:
                    yield Case(direction, kind, shape, options.dtype)


def _swept(
    case: Case, geometries: list[Geometry | Resident], target: Any, cubins: dict[Kernel, bytes]
) -> list[dict[str, Any]]:
    from norm_runs import launched
    from raw_launch import Device, LaunchError

    small = case.bytes < GRAPH_BYTES
    sets, rounds = (SMALL_SETS, 1) if small else (2, 4)
    device, run, entries = Device(), RawRun(case, sets), []
    for geometry in geometries:
        plan = case.plan(target, geometry)
        run.poison(device)
        try:
            calls = run.calls(device, plan, [cubins[launch.kernel] for launch in plan.launches])
            times = [device.microseconds(launched(calls), rounds, small) for _ in range(3)]
        except LaunchError as error:  # a cluster that the device has no room for, say
            print(f"{case.direction} {case.shape}: {described(geometry)}: {error}")
            continue
        error = run.error() if len(geometries) > 1 else 0.0
        if error <= CLOSE[TYPE_BYTES[case.dtype]]:
            entries.append({"geometry": geometry, "us": min(times) / sets})
        else:
            print(
                f"{case.direction} {case.kind} {case.shape}: {described(geometry)} wrong: {error}"
            )
    return entries


def _kernel_time(case: Case) -> float:
    from kernel_time import microseconds
    from shardops.kernels import softmax

    statics = {"scale": SCALE, "diagonal": case.diagonal}

    def op(*arrays):
        if case.direction == "backward":
            return softmax.softmax_backward(*arrays, None, **statics)
        x, *mask = arrays
        return softmax.softmax_forward(x, mask[0] if mask else None, None, **statics)

    return microseconds(op, [case.arrays(2 * i) for i in range(SETS)])


def _shown(best: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return best[:SHOWN] + [entry for entry in best[SHOWN:] if entry["chosen"]]


def described(geometry: Geometry | Resident) -> str:
    if isinstance(geometry, Resident):
        return f"{geometry}"
    text = f"{geometry.kind} threads {geometry.threads} rows {geometry.rows}"
    text += f" parts {geometry.parts} blocks {geometry.min_blocks}"
    text += f" group {geometry.group}" if geometry.kind == "tile" else ""
    text += f" batch {geometry.batch}" if geometry.kind == "staged" else ""
    text += " twice" if not geometry.hold else ""
    return text + (" two stages" if geometry.stages == 2 else "")


def _show(case: Case, entry: dict[str, Any]) -> None:
    mark = "*" if entry["chosen"] else " "
    shape = "x".join(map(str, case.shape))
    print(
        f"{mark} {case.direction:8} {case.kind:6} {shape:20} {entry['us']:8.1f} us"
        f" {entry['fraction']:.3f}  {described(entry['geometry'])}",
        flush=True,
    )


def _plain(case: Case, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        **asdict(case),
        "keys": case.shape[-1],
        "mask": case.kind,
        "us": entry["us"],
        "fraction": entry["fraction"],
        "chosen": entry["chosen"],
        "geometry": asdict(entry["geometry"]),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
