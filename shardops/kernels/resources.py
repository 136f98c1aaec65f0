"""What a kernel takes of a multiprocessor, as ptxas says when it compiles one."""

import re
from dataclasses import dataclass

_REGISTERS = re.compile(r"Used (\d+) registers")
_LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """Of one kernel; bytes are those of a thread, `shared_bytes` those of a block.

    Args:
      stack_bytes: local memory: what was spilled, and arrays that could not be kept in registers.
      shared_bytes: static shared memory; a launch may add dynamic.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


def resources(report: str) -> Resources | None:
    """Reads the report of `ptxas -v` on one kernel; None where it does not say."""
    registers = _REGISTERS.search(report)
    # A line for the kernel, and for each device function that was not inlined.
    local = [[int(number) for number in found] for found in _LOCAL.findall(report)]
    if registers is None or not local:
        return None
    shared = _SHARED.search(report)
    stack, stores, loads = map(max, zip(*local, strict=True))
    return Resources(int(registers[1]), stack, stores, loads, int(shared[1]) if shared else 0)
