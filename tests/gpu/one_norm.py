"""Runs a norm and a product once: `python -m tests.gpu.one_norm`, run by test_cases_gpu.py.

Prints as JSON what it computed, where its kernels and libraries came from, and its warnings.
"""

import hashlib
import json
import pathlib
import re
import warnings

import jax
import numpy as np

import shardops as so
from shardops.kernels import compile
from tests import references
from tests.closeness import error

LIBRARY = re.compile(r"/lib(nvrtc|cublasLt)\.so\.")


def step(x, gamma, weight):
    y, pull = jax.vjp(so.rms_norm, x, gamma)
    return so.gemm(y, weight), *pull(x)


def main() -> None:
    rng = np.random.default_rng(0)
    x, gamma, weight = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((40, 248), (248,), (248, 64))
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [np.asarray(a) for a in jax.jit(step)(x, gamma, weight)]
    wanted = references.rms_norm_vjp_reference(x, x, gamma)
    want = [references.rms_norm_reference(x, gamma).y @ weight.astype(np.float64)]
    want += [wanted.x, wanted.gamma]
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    print(
        json.dumps(
            {
                "errors": [error(one, other) for one, other in zip(got, want, strict=True)],
                "digest": hashlib.sha256(b"".join(a.tobytes() for a in got)).hexdigest(),
                "counts": vars(compile.counts),
                "compiler": compile.compiler(),
                "libraries": sorted({m.split()[-1] for m in maps if LIBRARY.search(m)}),
                "warnings": [str(w.message) for w in caught if "shardops" in str(w.message)],
            }
        )
    )


if __name__ == "__main__":
    main()
