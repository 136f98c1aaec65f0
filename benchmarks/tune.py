"""Times launch shapes of the norm kernels on this GPU and writes the best of each row length.

    python benchmarks/tune.py [--lengths 1024,4096] [--ops rms.forward,...] [--limit 40]
                              [--table DIR] [--json FILE]

All candidates compile first, on all cores. Each then runs back to back over arrays larger than the
caches, of a small problem over several sets of them and as a CUDA graph; one whose results are not
those of the plan's own choice is not counted. Prints a line a problem: the plan's fraction of the
copy bandwidth of this run, and the best candidate's. With `--limit 0` it times the plan's choices
alone. `--table` writes those that are 2 % faster than the plan's own as a table of
shardops/kernels/tuned.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from typing import Any

from candidates import norm_candidates
from compiling import compile_all
from shardops.kernels import tuned
from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.norm_plan import ForwardShape
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.target import Target, target_for

LENGTHS = (
    256, 512, 768, 1000, 1024, 1536, 2048, 2880, 3000, 3584, 4096, 5120, 6144, 7168, 8192, 12288,
    16384, 20480, 32768, 65536,
)  # fmt: skip
OPS = tuple(
    f"{kind}.{direction}{add}"
    for add in ("", ".add")
    for direction in ("forward", "backward")
    for kind in ("rms", "layer")
)
BYTES = 128 << 20  # of x
GRAPH_BYTES = 64 << 20  # that move: of fewer, launches take longer than kernels
SETS = 24  # of arrays, where so few bytes move that caches would hold one
WORTH = 0.98  # of the time of the plan's own choice
CLOSE = {2: 2e-2, 4: 1e-4}  # two orders of summation apart, by bytes of x


@dataclasses.dataclass(frozen=True)
class Job:
    problem: NormProblem
    backward: bool
    geometry: ForwardShape | None
    target: Target

    @property
    def name(self) -> str:
        return f"{self.problem.kind}.{self.direction}{'.add' if self.problem.add else ''}"

    @property
    def direction(self) -> str:
        return "backward" if self.backward else "forward"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--dtype", choices=tuple(TYPE_BYTES), default="bfloat16")
    parser.add_argument("--limit", type=int, default=40, help="candidates of each kind a problem")
    parser.add_argument("--seed", type=int, default=0, help="which candidates are drawn")
    parser.add_argument("--megabytes", type=int, default=BYTES >> 20, help="of x")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--sm-count", type=int, default=132)
    parser.add_argument("--table", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="all that was timed")
    options = parser.parse_args(arguments)
    target = target_for(options.arch, options.sm_count)
    target = dataclasses.replace(target, devices=(0,))  # which says how many clusters fit
    jobs = [job for op in options.ops.split(",") for job in jobs_of(op, options, target)]
    cubins = cubins_of(jobs, target.arch)
    results = time_all(jobs, cubins)
    if options.json:
        options.json.write_text(json.dumps(results) + "\n")
    if options.table:
        write_table(options.table / tuned.file_name(target.arch, target.sm_count), results)
    return 0


def jobs_of(op: str, options: Any, target: Target) -> list[Job]:
    kind, direction, *add = op.split(".")
    found = []
    for cols in map(int, options.lengths.split(",")):
        rows = max(1, (options.megabytes << 20) // (cols * TYPE_BYTES[options.dtype]))
        beta = options.dtype if kind == "layer" else None
        problem = NormProblem(
            rows, cols, kind, options.dtype, options.dtype, beta, add=add == ["add"]
        )
        backward = direction == "backward"
        chosen = norm_candidates(problem, target, backward, options.limit, options.seed)
        found += [Job(problem, backward, geometry, target) for geometry in chosen]
    return found


def cubins_of(jobs: list[Job], arch: str) -> list[tuple[bytes, ...]]:
    """Of each job's launches; before JAX takes the GPU, as it would hold cores."""
    from norm_runs import plans_of

    kernels = [
        [plan.kernel for plan in plans_of(job.problem, job.backward, job.geometry, job.target)]
        for job in jobs
    ]
    codes = compile_all(itertools.chain.from_iterable(kernels), arch)
    return [tuple(codes[kernel] for kernel in of_job) for of_job in kernels]


def time_all(jobs: list[Job], cubins: list[tuple[bytes, ...]]) -> list[dict[str, Any]]:
    import jax

    from bench import copy_bandwidth
    from raw_launch import Device

    device = Device()
    bandwidth = copy_bandwidth(2**30)
    kind = jax.devices()[0].device_kind
    print(f"{kind}, copy {bandwidth / 1e12:.3f} TB/s, {len(jobs)} candidates", flush=True)
    problems: dict[tuple[NormProblem, bool], list[int]] = {}
    for index, job in enumerate(jobs):
        problems.setdefault((job.problem, job.backward), []).append(index)
    results = []
    for indices in problems.values():
        timed = time_problem(device, [jobs[i] for i in indices], [cubins[i] for i in indices])
        timed["floor"] = timed.pop("bytes") / bandwidth * 1e6
        print_line(timed)
        results.append(timed)
    return results


def time_problem(device: Any, jobs: list[Job], cubins: list[tuple[bytes, ...]]) -> dict[str, Any]:
    from norm_runs import NormRun, plans_of, relative_error
    from raw_launch import LaunchError

    job = jobs[0]
    run = NormRun(job.problem, job.backward, job.target)
    graph = run.bytes < GRAPH_BYTES
    others = range(1, SETS) if graph else ()
    runs = [run, *(NormRun(job.problem, job.backward, job.target, part) for part in others)]
    wanted, rows = None, []
    for candidate, codes in zip(jobs, cubins, strict=True):
        geometry = candidate.geometry
        row: dict[str, Any] = {"geometry": geometry and dataclasses.asdict(geometry)}
        plans = plans_of(job.problem, job.backward, geometry, job.target)
        run.poison(device)
        try:
            calls = [each.calls(device, plans, codes) for each in runs]
            row["us"] = least_time(device, calls, graph)
            # Without the last sum.
            main = [each[: max(1, len(each) - job.backward)] for each in calls]
            row["main"] = least_time(device, main, graph)
        except LaunchError as error:  # a cluster that the device has no room for, say
            row["failed"] = str(error)
            rows.append(row)
            continue
        if len(jobs) > 1:
            values = run.values()
            wanted = wanted or values
            row["error"] = relative_error(values, wanted)
        rows.append(row)
    return {
        "op": job.name,
        "key": tuned.keys(job.problem, job.target, job.direction)[0],
        "cols": job.problem.cols,
        "x": job.problem.x,
        "bytes": run.bytes,
        "own": rows[0],
        "candidates": sorted(rows[1:], key=lambda row: row.get("us", float("inf"))),
    }


def least_time(device: Any, calls: list[list[Any]], graph: bool) -> float:
    """Microseconds of one set's calls, back to back with the others'."""
    from norm_runs import launched

    in_turn = launched(list(itertools.chain.from_iterable(calls)))
    rounds = max(1, 6 // len(calls))
    return min(device.microseconds(in_turn, rounds, graph) for _ in range(3)) / len(calls)


def print_line(timed: dict[str, Any]) -> None:
    floor, own = timed["floor"], timed["own"]
    main = f" (first kernel {floor / own['main']:.3f})" if "backward" in timed["op"] else ""
    line = f"{timed['op']:18} {timed['cols']:7} {own['us']:8.1f} us {floor / own['us']:.3f}{main}"
    best = fastest(timed)
    if best is not None:
        line += f"  best {floor / best['us']:.3f} {best['geometry']}"
    odd = [row for row in timed["candidates"] if "us" not in row or not right(timed, row)]
    print(line + (f"  {len(odd)} failed or wrong" if odd else ""), flush=True)


def right(timed: dict[str, Any], row: dict[str, Any]) -> bool:
    return row["error"] <= CLOSE[TYPE_BYTES[timed["x"]]]


def fastest(timed: dict[str, Any]) -> dict[str, Any] | None:
    fit = [row for row in timed["candidates"] if "us" in row and right(timed, row)]
    return fit[0] if fit else None


def write_table(path: pathlib.Path, results: list[dict[str, Any]]) -> None:
    """Keeps what the table had for other problems."""
    table = json.loads(path.read_text()) if path.exists() else {}
    for timed in results:
        best = fastest(timed)
        if best is not None and best["us"] < WORTH * timed["own"]["us"]:
            table[timed["key"]] = best["geometry"]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    path.write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(table)} shapes in {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
