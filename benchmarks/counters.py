"""What the profiler counts of single launches: a row a kernel, as docs/measured.md has them.

    python benchmarks/counters.py rms.forward:16384,32768 softmax.forward.causal:4096
        "norm.rms block both:1024" "quantize.mxfp8 both:4096" [--mib 128] [--dtype bfloat16]

A case is a norm (an op of tune.py), a softmax (direction and kind of softmax_times.py), or a norm
that quantises or a quantisation (a name of quantize_times.py), each with row lengths. Launch shapes
are the plan's. Kernels compile first; then `ncu` runs this file again, which launches each once,
with clocks as they are and caches flushed before each.

busy: cycles in which a multiprocessor had a block, of the least busy and of the mean, over those of
the busiest. Stalls: warps that wait, per issued instruction. Needs a GPU, and Nsight Compute.
"""

import argparse
import csv
import dataclasses
import io
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from compiling import code_of, compile_all
from shardops.kernels.element_types import TYPE_BYTES
from shardops.kernels.launch import Kernel, Launch
from shardops.kernels.norm_problem import NormProblem
from shardops.kernels.target import Target, target_for

KERNELS = "regex:^(norm|softmax|quantize)_"
COUNTERS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "rate": "dram__bytes.sum.per_second",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "least": "sm__cycles_active.min",
    "mean": "sm__cycles_active.avg",
    "most": "sm__cycles_active.max",
}
STALLS = (
    "long_scoreboard", "short_scoreboard", "wait", "barrier", "math_pipe_throttle", "not_selected",
    "lg_throttle", "mio_throttle", "branch_resolving", "no_instruction", "sleeping", "membar",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SHOWN_STALLS = 3
HEADS = (
    "kernel", "µs", "DRAM % of peak", "TB/s", "L2 %", "L1 %", "issue slots %", "registers",
    "occupancy %", "busy: least, mean", "largest stalls",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """A case of one row length, as the command line names it."""

    name: str  # "rms.forward.add", "softmax.forward.causal", "norm.rms block both"
    cols: int
    mib: float
    dtype: str

    @property
    def rows(self) -> int:
        return max(1, int(self.mib * 2**20) // (self.cols * TYPE_BYTES[self.dtype]))

    def launches(self, target: Target) -> tuple[Launch, ...]:
        return self._of(target)[0]

    def run(self, device: Any, target: Target, codes: dict[Kernel, bytes]) -> None:
        launches, calls = self._of(target)
        done = calls(device, {launch.kernel: codes[launch.kernel] for launch in launches})
        for call in done[: len(launches)]:
            call()
        device.call("cuStreamSynchronize", device.stream)

    def _of(self, target: Target) -> tuple[tuple[Launch, ...], Any]:
        """The launches, and what makes calls of a device and machine code."""
        family, _, rest = self.name.partition(".")
        if family == "softmax":
            return self._softmax(rest, target)
        if family in ("norm", "quantize"):
            return self._quantized(family, rest, target)
        return self._norm(target)

    def _norm(self, target: Target) -> tuple[tuple[Launch, ...], Any]:
        from norm_runs import NormRun, plans_of

        kind, direction, *add = self.name.split(".")
        beta = self.dtype if kind == "layer" else None
        problem = NormProblem(
            self.rows, self.cols, kind, self.dtype, self.dtype, beta, add=add == ["add"]
        )
        backward = direction == "backward"
        plans = plans_of(problem, backward, None, target)

        def calls(device: Any, codes: dict[Kernel, bytes]) -> list[Any]:
            run = NormRun(problem, backward, target)
            return run.calls(device, plans, tuple(codes[plan.kernel] for plan in plans))

        return plans, calls

    def _softmax(self, name: str, target: Target) -> tuple[tuple[Launch, ...], Any]:
        from softmax_runs import Case, RawRun, shape_of

        direction, kind = name.split(".")
        case = Case(direction, kind, shape_of(kind, self.rows, self.cols), self.dtype)
        plan = case.plan(target)

        def calls(device: Any, codes: dict[Kernel, bytes]) -> list[Any]:
            of_launches = [codes[launch.kernel] for launch in plan.launches]
            return RawRun(case).calls(device, plan, of_launches)

        return tuple(plan.launches), calls

    def _quantized(self, family: str, name: str, target: Target) -> tuple[tuple[Launch, ...], Any]:
        from quantize_times import calls_of, norm_cases, quantize_cases

        cases = norm_cases if family == "norm" else quantize_cases
        name = f"quantize {name}" if family == "quantize" else name
        found = {case.name: case for case in cases(self.rows, self.cols, self.dtype, target)}
        if name not in found:
            raise SystemExit(f"{name} is not among: {', '.join(found)}")
        return found[name].launches, lambda device, codes: calls_of(
            device, found[name], self.dtype, codes
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="NAME:COLS,...")
    parser.add_argument("--mib", type=float, default=128, help="size of x")
    parser.add_argument("--dtype", choices=tuple(TYPE_BYTES), default="bfloat16")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--sm-count", type=int, default=132)
    parser.add_argument("--inside", action="store_true", help="launch only: what ncu runs")
    options = parser.parse_args(arguments)
    target = target_for(options.arch, options.sm_count)
    target = dataclasses.replace(target, devices=(0,))  # which says how many clusters fit
    jobs = list(_jobs(options))
    kernels = dict.fromkeys(_kernels(jobs, target))
    if options.inside:
        import jax

        from raw_launch import Device

        jax.block_until_ready(jax.numpy.zeros(8))  # JAX makes the context current
        device = Device()
        codes = {kernel: code_of(kernel, target.arch) for kernel in kernels}  # from the disk
        for job in jobs:
            job.run(device, target, codes)
        return 0
    compile_all(kernels, target.arch)
    metrics = ",".join([*COUNTERS.values(), *map(STALL.format, STALLS)])
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", KERNELS, "--metrics", metrics]
    command += [sys.executable, __file__, "--inside", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    launched = [(job, launch) for job in jobs for launch in job.launches(target)]
    counted = list(counts_of(done.stdout))
    if done.returncode or len(counted) != len(launched):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        print(f"ncu counted {len(counted)} of {len(launched)} launches", file=sys.stderr)
        return 1
    print("|".join(["", *(f" {head} " for head in HEADS), ""]))
    print("|---" * len(HEADS) + "|")
    for (job, launch), counts in zip(launched, counted, strict=True):
        print(row_of(f"{job.name} {job.cols}, {launch.kernel.name}", counts))
    return 0


def _jobs(options: Any) -> Iterator[Job]:
    for case in options.cases:
        name, _, lengths = case.rpartition(":")
        for cols in lengths.split(","):
            yield Job(name, int(cols), options.mib, options.dtype)


def _kernels(jobs: Sequence[Job], target: Target) -> Iterator[Kernel]:
    launches = itertools.chain.from_iterable(job.launches(target) for job in jobs)
    return (launch.kernel for launch in launches)


def counts_of(output: str) -> Iterator[dict[str, float]]:
    """What ncu printed, by the names above: after lines of its own, names, units, and rows."""
    start = output.find('"ID"')
    rows = list(csv.DictReader(io.StringIO(output[start:]))) if start >= 0 else []
    names = COUNTERS | {stall: STALL.format(stall) for stall in STALLS}
    for row in rows[1:]:
        yield {name: float(row[metric].replace(",", "")) for name, metric in names.items()}


def row_of(kernel: str, counts: dict[str, float]) -> str:
    stalls = sorted(STALLS, key=lambda stall: -counts[stall])[:SHOWN_STALLS]
    percent = [f"{counts[name]:.0f}" for name in ("l2", "l1", "issue", "registers", "occupancy")]
    busy = ", ".join(f"{counts[name] / counts['most']:.2f}" for name in ("least", "mean"))
    waits = ", ".join(f"{stall.replace('_', ' ')} {counts[stall]:.1f}" for stall in stalls)
    time = [f"{counts['nanoseconds'] / 1e3:.1f}", f"{counts['dram']:.0f}"]
    cells = [kernel, *time, f"{counts['rate'] / 1e12:.2f}", *percent, busy, waits]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
