"""Times what cuBLASLt's heuristic offers for bfloat16 products, in its order, with their settings.

    python benchmarks/gemm_candidates.py [--limit 16] [--json FILE]

Of each candidate: microseconds of two runs, and what cublasLtMatmulAlgoConfigGetAttribute says.
Then the first candidate where something else is asked for: alignments of 256 bytes rather than 16,
more or less workspace, any reduction of a split k. Needs a GPU.
"""

import argparse
import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemm_times import MORE_SHAPES, SHAPES
from shardops.kernels import library

WORKSPACE = 32 << 20
BFLOAT16 = 14  # cudaDataType
# cublasLtMatmulAlgoConfigAttributes_t: number and bytes.
SETTINGS = {
    "id": (0, 4),
    "tile": (1, 4),
    "split": (2, 4),
    "reduction": (3, 4),
    "swizzle": (4, 4),
    "option": (5, 4),
    "stages": (6, 4),
    "inner": (7, 2),
    "cluster": (8, 2),
}
VARIANTS: dict[str, dict[str, int]] = {
    "aligned to 256": {"align": 256},
    "workspace 4 MiB": {"workspace_bytes": 4 << 20},
    "workspace 128 MiB": {"workspace_bytes": 128 << 20},
    "any reduction": {"reductions": 7},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for m, n, k in (*SHAPES, *MORE_SHAPES):
        print(f"{m}x{n}x{k}")
        candidates = measure((m, n, k), options.limit)
        for number, candidate in enumerate(candidates):
            print(f"  {number:2} {_line(candidate)}")
        variants = {name: measure((m, n, k), 1, **also)[0] for name, also in VARIANTS.items()}
        for name, candidate in variants.items():
            print(f"     {_line(candidate)}  {name}", flush=True)
        found.append({"shape": (m, n, k), "candidates": candidates, "variants": variants})
    if options.json:
        options.json.write_text(json.dumps(found))


def measure(shape: tuple[int, int, int], limit: int, **also: int) -> list[dict[str, Any]]:
    """The candidates of a product, in the heuristic's order."""
    m, n, k = shape
    asked = {"m": m, "n": n, "k": k, "type": BFLOAT16, "out_type": BFLOAT16}
    asked |= {"workspace_bytes": WORKSPACE, **also}
    query = library.core().gemm_query
    runs = [query(device=0, limit=limit, timed=True, **asked) for _ in range(2)]
    return [
        {
            "microseconds": [c["microseconds"] for c in both],
            "waves": both[0]["waves"],
            "workspace": both[0]["workspace_bytes"],
            **settings(both[0]["algo"]),
        }
        for both in zip(*runs, strict=True)
    ]


def settings(algorithm: bytes) -> dict[str, int]:
    """What an algorithm is; -1 where the library does not say."""
    get = ctypes.CDLL(library.find_library("cublasLt")).cublasLtMatmulAlgoConfigGetAttribute
    held = ctypes.create_string_buffer(algorithm, len(algorithm))
    values = {}
    for name, (number, size) in SETTINGS.items():
        value, written = ctypes.c_uint64(0), ctypes.c_size_t(0)
        status = get(
            held, number, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)
        )
        values[name] = -1 if status else value.value
    return values


def _line(candidate: Mapping[str, Any]) -> str:
    times = " ".join(f"{t:8.1f}" for t in candidate["microseconds"])
    named = " ".join(f"{name}={candidate[name]}" for name in SETTINGS)
    return f"{times} µs  waves={candidate['waves']:.3f} ws={candidate['workspace']} {named}"


if __name__ == "__main__":
    main()
