"""Programs lowered for a GPU on a machine that has none, and the launches in them."""

import re
from collections.abc import Callable
from typing import Any

import jax

from shardops.kernels.target import Target, target_for, use_target

GPU = target_for("sm_90", 132)


def lowered(function: Callable[..., Any], *shapes: Any, target: Target = GPU) -> str:
    """`shapes`: (shape, dtype) of each argument."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    with use_target(target):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def launches(text: str) -> list[tuple[str, int, int]]:
    """(kernel, operands, blocks) of each launch, in order."""
    calls = [line for line in text.splitlines() if "@shardops_launch" in line]
    return [
        (
            re.search(r'name = "(\w+)"', line)[1],
            re.search(r"@shardops_launch\(([^)]*)\)", line)[1].count("%"),
            int(re.search(r"grid = (?:dense<|array<i64: )\[?(\d+)", line)[1]),
        )
        for line in calls
    ]


def grids(text: str) -> list[tuple[str, int]]:
    """(kernel, blocks) of each launch, in order."""
    return [(name, blocks) for name, _, blocks in launches(text)]
