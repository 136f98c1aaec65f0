"""Times what cuBLASLt's heuristic offers for products, in its order, with their settings.

    python benchmarks/gemm_candidates.py [--models] [--json FILE]

Of each candidate: microseconds of two runs, and what cublasLtMatmulAlgoConfigGetAttribute says.
Then the first candidate where something else is asked for: alignments of 256 bytes rather than 16,
more or less workspace, any reduction of a split k. With --models: once, the products of layers of
transformers, forward and backward, in bfloat16, and forward with 8-bit operands of one scale: time
of the first over that of the one that `gemm_ranking` takes, and over that of the best, which is
shown. Needs a GPU.
"""

import argparse
import ctypes
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gemm_times import MORE_SHAPES, SHAPES
from shardops.kernels import gemm_ranking, library

WORKSPACE = 32 << 20
LIMIT = 16  # more than it has
BFLOAT16, E4M3 = 14, 28  # cudaDataType
EIGHT_BITS = {"type": E4M3, "transb": 1, "scale_a": 1, "scale_b": 1, "fast_accum": 1}
ROWS = (512, 2048, 4096, 8192, 16384)
LAYERS = (  # elements in and out
    (2048, 8192),
    (4096, 4096),
    (4096, 6144),
    (4096, 14336),
    (14336, 4096),
    (5120, 13824),
    (8192, 8192),
    (8192, 28672),
)
# cublasLtMatmulAlgoConfigAttributes_t: number and bytes.
SETTINGS = {
    "kernel": (0, 4),
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
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = list(of_models() if options.models else of_shapes())
    if options.json:
        options.json.write_text(json.dumps(found))


def of_shapes() -> Iterator[dict[str, Any]]:
    for m, n, k in (*SHAPES, *MORE_SHAPES):
        print(f"{m}x{n}x{k}")
        candidates = measure({"m": m, "n": n, "k": k}, runs=2)
        for number, candidate in enumerate(candidates):
            print(f"  {number:2} {_line(candidate)}")
        variants = {
            name: measure({"m": m, "n": n, "k": k} | also, runs=2)[0]
            for name, also in VARIANTS.items()
        }
        for name, candidate in variants.items():
            print(f"     {_line(candidate)}  {name}", flush=True)
        yield {"product": {"m": m, "n": n, "k": k}, "candidates": candidates}


def of_models() -> Iterator[dict[str, Any]]:
    for rows, (width, out) in itertools.product(ROWS, LAYERS):
        products = {
            "forward": {"m": rows, "n": out, "k": width},
            "to lhs": {"m": rows, "n": width, "k": out, "transb": 1},
            "to rhs": {"m": width, "n": out, "k": rows, "transa": 1},
            "8 bits": {"m": rows, "n": out, "k": width, **EIGHT_BITS},
        }
        for name, product in products.items():
            candidates = measure(product)
            taken = gemm_ranking.preferred(candidates, _asked(product))
            best = min(candidates, key=lambda c: c["microseconds"])
            first, *others = (c["microseconds"][0] for c in (candidates[0], taken, best))
            gains = " ".join(f"{first / other:.3f}" for other in others)
            print(f"{name:8} {rows}x{out}x{width}: {gains} {_line(best)}", flush=True)
            yield {"product": product, "candidates": candidates}


def measure(product: Mapping[str, int], runs: int = 1) -> list[dict[str, Any]]:
    """The candidates of a product, in the heuristic's order."""
    query = library.core().gemm_query
    timed = [query(device=0, limit=LIMIT, timed=True, **_asked(product)) for _ in range(runs)]
    return [
        {
            "microseconds": [c["microseconds"] for c in both],
            "waves": both[0]["waves"],
            "workspace": both[0]["workspace_bytes"],
            **settings(both[0]["algo"]),
        }
        for both in zip(*timed, strict=True)
    ]


def _asked(product: Mapping[str, int]) -> dict[str, int]:
    return {"type": BFLOAT16, "out_type": BFLOAT16, "workspace_bytes": WORKSPACE, **product}


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
