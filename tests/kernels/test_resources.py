"""Every family of kernels compiles for every architecture, and none keeps anything in local memory.

No GPU and no CUDA headers. `SHARDOPS_EXHAUSTIVE=1` compiles all combinations; without it they take
turns, so that each family, pass, dtype, row length and architecture is there.
"""

import functools
import itertools
import os
import struct

import pytest

from shardops import errors
from shardops.kernels import compile, packing
from shardops.kernels.families import DTYPES, FAMILIES, OPTIONS, PASSES, Request
from shardops.kernels.resources import Resources, resources

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

EXHAUSTIVE = os.environ.get("SHARDOPS_EXHAUSTIVE") == "1"
SM_COUNTS = {"sm_90": 132, "sm_80": 108, "sm_100": 148}
# Row lengths at which the memory's speed is the goal, and the shortest and longest that are timed.
LENGTHS = (256, 512, 768, 1000, 1024, 1536, 2048, 2880, 3000, 3584, 4096, 5120, 6144, 7168, 8192)
LENGTHS += (12288, 16384, 20480, 32768, 65536, 24, 33, 262144, 1048576)
LENGTHS += (1001, 3001, 20001, 1048577)  # no word of 16 bytes cuts these
# Those of kernels made for a length; of the others: test_quantize_compile.py.
OPS = ("rms_norm", "layer_norm", "softmax")
ROWS = (64, 8192)


def choices(op: str) -> list[tuple[tuple[str, str], ...]]:
    """Options: none, each alone, and all together; gamma in float32 stands for its dtypes."""
    values = {}
    for name in FAMILIES[op].options:
        others = OPTIONS[name].values[1:]
        values[name] = [value for value in others if value not in DTYPES] or others[:1]
    alone = [((name, value),) for name in values for value in values[name]]
    return [(), *alone, tuple((name, of[0]) for name, of in values.items())]


def requests(op: str, dtype: str) -> list[tuple[Request, str]]:
    """What is compiled of an op and a dtype, and for which architecture."""
    if EXHAUSTIVE:
        everything = itertools.product(LENGTHS, choices(op), SM_COUNTS)
        return [(Request(op, n, dtype, PASSES, options), arch) for n, options, arch in everything]
    # Two of three lengths a dtype; four architectures (sm_90 twice) for one set of options.
    lengths = [n for i, n in enumerate(LENGTHS) if (i + DTYPES.index(dtype)) % 3]
    arches = ("sm_90", "sm_80", "sm_90", "sm_100")
    found = []
    for turn, length in enumerate(lengths, len(lengths) * DTYPES.index(dtype)):
        options = choices(op)[turn // len(arches) % len(choices(op))]
        found.append((Request(op, length, dtype, PASSES, options), arches[turn % len(arches)]))
    return found


@functools.cache  # the sum of partials, of one row length, is that of all dtypes
def taken(kernel: packing.Kernel, arch: str) -> Resources:
    code, about = compile.compile_kernel(kernel.file, kernel.name, kernel.constants, arch)
    assert code[:4] == b"\x7fELF"
    assert about["resources"] is not None, "ptxas does not say what the kernel takes"
    return Resources(**about["resources"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_no_kernel_spills_to_local_memory(op, dtype):
    compiled, spilling = set(), []
    for request, arch in requests(op, dtype):
        for rows in ROWS:
            for kernel in packing.kernels_of(request, arch, rows, SM_COUNTS[arch]):
                used = taken(kernel, arch)
                if used.stack_bytes and (kernel, arch) not in compiled:
                    spilling.append(f"{arch} {request} {kernel.name}: {used}")
                compiled.add((kernel, arch))
    print(f"{len(compiled)} kernels")
    assert len(compiled) >= 2 * len(requests(op, dtype))
    assert not spilling, "\n".join([f"{len(spilling)} of {len(compiled)} spill:", *spilling])


# Rows that end within a warp, a beta wider than gamma, a compiler that takes more registers.
ODD = (
    ("sm_90", Request("layer_norm", 12248, "bfloat16", ("forward",))),
    ("sm_80", Request("layer_norm", 16200, "float16", ("forward",), (("beta_dtype", "none"),))),
    ("sm_90", Request("layer_norm", 16360, "float16", ("forward",), (("beta_dtype", "float32"),))),
    ("sm_90", Request("layer_norm", 14071, "bfloat16", ("forward",), (("beta_dtype", "float32"),))),
    ("sm_120", Request("layer_norm", 13568, "float16", ("forward",))),
    ("sm_80", Request("rms_norm", 12344, "float16", ("backward",))),
    ("sm_80", Request("layer_norm", 9600, "float16", ("backward",))),
    ("sm_120", Request("rms_norm", 15024, "bfloat16", ("backward",))),
)


@pytest.mark.parametrize("arch, request_", ODD)
def test_odd_rows_do_not_spill(arch, request_):
    kernels = packing.kernels_of(request_, arch, 8192, SM_COUNTS.get(arch, 188))
    assert {kernel.name: taken(kernel, arch).stack_bytes for kernel in kernels} == {
        kernel.name: 0 for kernel in kernels
    }


def test_turns_reach_every_architecture_option_and_length():
    for op in OPS:
        asked = [each for dtype in DTYPES for each in requests(op, dtype)]
        pairs = {(arch, request.options) for request, arch in asked}
        assert pairs == set(itertools.product(SM_COUNTS, choices(op)))
        assert {request.length for request, _ in asked} == set(LENGTHS)


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* y, const float* x) {
  __shared__ float row[256];
  float held[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) held[i] = x[i * 2048 + threadIdx.x];
  row[threadIdx.x % 256] = held[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) y[i * 2048 + threadIdx.x] = held[i] * held[127 - i] + row[i];
}
"""


@pytest.mark.parametrize("arch", SM_COUNTS)
def test_report_agrees_with_the_machine_code(arch):
    """The compiler's account, against the attributes that the driver loads a kernel by."""
    code, report = compile.compile_text(SPILLING, "crowded", arch, report=True)
    used = resources(report)
    assert used is not None
    assert used.stack_bytes > 100
    assert used.spill_store_bytes > 100
    assert used.spill_load_bytes > 100
    assert used.registers == 32
    assert used.shared_bytes == 1024
    assert attributes(code) == (used.registers, used.stack_bytes)

    kernel = packing.kernels_of(Request("rms_norm", 1000, "float32"), arch, 64, 132)[0]
    code, about = compile.compile_kernel(kernel.file, kernel.name, kernel.constants, arch)
    used = Resources(**about["resources"])
    assert used.registers > 16
    assert attributes(code) == (used.registers, used.stack_bytes)


def test_report_leaves_the_machine_code_alone():
    kernel = packing.kernels_of(Request("layer_norm", 1000, "bfloat16"), "sm_90", 64, 132)[0]
    text = compile.source_text(kernel.file, kernel.constants)
    with_report, _ = compile.compile_text(text, kernel.name, "sm_90", report=True)
    without, log = compile.compile_text(text, kernel.name, "sm_90")
    assert "ptxas info" not in log
    name = f".text.{kernel.name}"
    assert sections(with_report)[name] == sections(without)[name]
    assert len(sections(without)[name]) > 1000


def test_report_without_figures_is_none():
    assert resources("") is None
    assert resources("ptxas info    : Used 12 registers, 8 bytes smem") is None


def test_largest_of_several_functions_counts():
    report = (
        "ptxas info    : Function properties for helper\n"
        "    40 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Function properties for kernel\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 24 registers, used 1 barriers, 16 bytes smem, 400 bytes cmem[0]\n"
    )
    assert resources(report) == Resources(24, 40, 8, 4, 16)


# --- ELF, as far as the checks above need it ----------------------------------------------------


def sections(code: bytes) -> dict[str, bytes]:
    """Contents of the sections of a 64-bit little-endian ELF file, by name."""
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<3H", code, 58)
    headers = [struct.unpack_from("<2I4Q2I2Q", code, table + i * size) for i in range(count)]
    texts = headers[names][4]
    found = {}
    for name, _, _, _, offset, length, *_ in headers:
        start = texts + name
        found[code[start : code.index(b"\0", start)].decode()] = code[offset : offset + length]
    return found


def attributes(code: bytes) -> tuple[int, int]:
    """Registers and stack frame of a cubin's only kernel, from `.nv.info`.

    An attribute is its format (4: sized), its kind (0x2f: registers, 0x11: frame), the size of its
    value, and the value: a symbol and a number.
    """
    info = sections(code)[".nv.info"]
    found, at = {}, 0
    while at < len(info):
        form, kind, size = struct.unpack_from("<2BH", info, at)
        if form == 4:
            found[kind] = struct.unpack_from("<2I", info, at + 4)[1] if size == 8 else None
        at += 4 + (size if form == 4 else 0)
    return found[0x2F], found[0x11]
