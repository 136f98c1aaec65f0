"""benchmarks/counters.py, but for ncu and the GPU."""

import importlib
import sys
from pathlib import Path

import pytest

from shardops.kernels.target import target_for

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = {  # of which each is launched by what
    ("rms.forward", 4096): ["norm_forward"],
    ("layer.backward.add", 4096): ["norm_backward_staged", "norm_finish"],
    ("softmax.forward.causal", 4096): ["softmax_forward"],
    ("norm.rms block both", 1024): ["norm_quantized_tiles"],
    ("quantize.current rows", 4096): ["quantize_magnitudes", "quantize_tiles"],
}


@pytest.fixture
def counters(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("counters")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize(("name", "cols"), CASES)
def test_cases_of_every_family_have_their_launches(counters, name, cols):
    job = counters.Job(name, cols, 128, "bfloat16")
    names = [launch.kernel.name for launch in job.launches(target_for("sm_90", 132))]
    assert names == CASES[name, cols]


def test_unknown_names_are_refused_with_those_that_there_are(counters):
    job = counters.Job("quantize.mxfp9 rows", 4096, 128, "bfloat16")
    with pytest.raises(SystemExit, match=r"mxfp9 rows is not among: .*quantize mxfp8 rows"):
        job.launches(target_for("sm_90", 132))


def test_rows_are_of_the_counters_that_the_heads_name(counters):
    metrics = {
        "gpu__time_duration.sum": "67,300",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": "75.6",
        "dram__bytes.sum.per_second": "3,640,000,000,000",
        "lts__throughput.avg.pct_of_peak_sustained_elapsed": "86.2",
        "l1tex__throughput.avg.pct_of_peak_sustained_active": "34",
        "sm__inst_issued.avg.pct_of_peak_sustained_active": "50",
        "launch__registers_per_thread": "96",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "29",
        "sm__cycles_active.min": "90,000",
        "sm__cycles_active.avg": "97,000",
        "sm__cycles_active.max": "100,000",
    }
    for i, stall in enumerate(counters.STALLS):
        metrics[counters.STALL.format(stall)] = f"{5 - i if i < 3 else 0.1}"
    heads = ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *metrics])
    units = ",".join(['""'] * (2 + len(metrics)))
    values = ",".join(f'"{value}"' for value in ["0", "norm_forward", *metrics.values()])
    output = f"==PROF== Connected\n==PROF== Disconnected\n{heads}\n{units}\n{values}\n"
    (counts,) = counters.counts_of(output)
    row = counters.row_of("rms.forward 20480, norm_forward", counts)
    assert row == (
        "| rms.forward 20480, norm_forward | 67.3 | 76 | 3.64 | 86 | 34 | 50 | 96 | 29 | "
        "0.90, 0.97 | long scoreboard 5.0, short scoreboard 4.0, wait 3.0 |"
    )
    assert row.count("|") == len(counters.HEADS) + 1
    assert not list(counters.counts_of("==ERROR== No kernels were profiled.\n"))
