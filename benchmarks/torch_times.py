"""Kernel times of the same ops in PyTorch, as JSON on standard output: run by bench.py.

    python benchmarks/torch_times.py <SHAPES

In a process of its own, which leaves the GPU's memory and its profiler to JAX afterwards. Ops are
PyTorch's own, without torch.compile: what hides keys from a softmax is a masked_fill before it.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn import functional

EPSILON = 1e-6
SCALE = 0.125
SETS, CALLS = 4, 8


def main() -> int:
    asked = json.load(sys.stdin)
    found = {}
    for shape in asked["norms"]:
        for op, calls in norm_ops(*shape).items():
            found[f"{op} {shape}"] = microseconds(calls)
    for kind, shape in asked["softmax"]:
        for op, calls in softmax_ops(kind, shape).items():
            found[f"{op} {shape}"] = microseconds(calls)
    json.dump({"version": torch.__version__, "microseconds": found}, sys.stdout)
    return 0


def norm_ops(rows: int, cols: int) -> dict[str, list[Callable[[], Any]]]:
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    gamma, beta = (draw(cols, requires_grad=True) for _ in range(2))
    norms = {
        "rms_norm": (lambda x: functional.rms_norm(x, (cols,), gamma, EPSILON), (gamma,)),
        "layer_norm": (
            lambda x: functional.layer_norm(x, (cols,), gamma, beta, EPSILON),
            (gamma, beta),
        ),
    }
    ops: dict[str, list[Callable[[], Any]]] = defaultdict(list)
    for _ in range(SETS):
        x, dy = draw(rows, cols, requires_grad=True), draw(rows, cols)
        for name, (norm, parameters) in norms.items():
            ops[f"{name} forward"].append(partial(without_gradient, norm, x))
            ops[f"{name} backward"].append(partial(pulled_back, norm(x), (x, *parameters), dy))
    return ops


def softmax_ops(kind: str, shape: Sequence[int]) -> dict[str, list[Callable[[], Any]]]:
    hidden = None
    if kind == "causal":
        hidden = torch.ones(shape[-2:], dtype=torch.bool, device="cuda").triu(1)
    elif kind == "masked":
        hidden = torch.rand(shape[0], 1, *shape[-2:], device="cuda") < 0.3

    def softmax(x: torch.Tensor) -> torch.Tensor:
        z = x * SCALE
        return torch.softmax(z if hidden is None else z.masked_fill(hidden, -torch.inf), -1)

    draw = partial(torch.randn, shape, device="cuda", dtype=torch.bfloat16)
    ops: dict[str, list[Callable[[], Any]]] = defaultdict(list)
    for _ in range(SETS):
        x = draw(requires_grad=True)
        ops[f"softmax {kind} forward"].append(partial(without_gradient, softmax, x))
        if kind != "masked":
            dy = draw()
            ops[f"softmax {kind} backward"].append(partial(pulled_back, softmax(x), (x,), dy))
    return ops


def without_gradient(op: Callable[..., Any], x: torch.Tensor) -> Any:
    with torch.no_grad():
        return op(x)


def pulled_back(y: torch.Tensor, of: Sequence[torch.Tensor], dy: torch.Tensor) -> Any:
    return torch.autograd.grad(y, of, dy, retain_graph=True)


def microseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """The kernel time of a call: of each kernel the median, times its runs a call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            for call in calls:
                call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.time_range.elapsed_us())
    runs = CALLS * len(calls)
    return sum(statistics.median(each) * round(len(each) / runs, 2) for each in times.values())


if __name__ == "__main__":
    sys.exit(main())
