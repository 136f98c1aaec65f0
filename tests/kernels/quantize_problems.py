"""Quantising kernels on the host: their arrays, and what the jnp reference makes of them."""

import itertools
from math import prod

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from shardops.kernels.launch import Launch
from shardops.kernels.quantize_plan import QuantizeProblem, written_layouts
from shardops.primitives.quantize_local import Form, quantized
from shardops.primitives.scaling import ScalingMode
from shardops.rules.quantize import Blocks
from tests.kernels.norm_problems import DTYPES

MODES = {
    "tensor": (ScalingMode.TENSOR_DELAYED, None),
    "row128": (ScalingMode.BLOCK_128, (1, 128)),
    "square": (ScalingMode.BLOCK_128, (128, 128)),
    "row32": (ScalingMode.MXFP8, (1, 32)),
}
LAYOUTS = {(True, False): "rows", (False, True): "columns", (True, True): "both"}
ODD = (np.nan, -np.inf, np.inf, 0.0, -0.0, 1e-39, -3e-42, 3.4e38)


def draw(rng: np.random.Generator, problem: QuantizeProblem) -> np.ndarray:
    """Magnitudes over many octaves; a few rows of zeros, and numbers of every odd kind."""
    p = problem
    shape = (p.entries, p.groups, p.rows, p.cols)
    top = 8 if p.x == "float16" else 12
    x = rng.standard_normal(shape) * np.exp2(rng.uniform(-20, top, shape))
    x[:, :, rng.random(p.rows) < 0.1] = 0
    flat = x.reshape(-1)
    for value, at in zip(itertools.cycle(ODD), rng.integers(0, flat.size, min(16, flat.size))):
        flat[at] = value
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(DTYPES[p.x])


def form_of(problem: QuantizeProblem) -> Form:
    mode, block = MODES[problem.scales]
    if problem.scales == "tensor" and not problem.amax:
        mode = ScalingMode.TENSOR_CURRENT
    layout = LAYOUTS[problem.as_rows, problem.as_columns]
    return Form(problem.format, mode, Blocks(layout, block, added=1))


def wanted(problem: QuantizeProblem, x: np.ndarray, scale_inv: np.ndarray) -> list[np.ndarray]:
    form = form_of(problem)
    given = (jnp.asarray(scale_inv),) if form.given else ()
    return [np.asarray(a) for a in quantized(jnp.asarray(x), *given, form=form)]


def blanks(launch: Launch, like: list[np.ndarray]) -> list[np.ndarray]:
    """Results before the launch: zero where it says so, else bytes that are no number's."""
    out = [np.full(prod(a.shape) * a.dtype.itemsize, 0xAB, np.uint8) for a in like]
    for index in launch.zeroed:
        if index < len(out):
            out[index][:] = 0
    return [o.view(a.dtype).reshape(a.shape) for o, a in zip(out, like, strict=True)]


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """By bits; one NaN is as good as another."""
    nan = np.isnan(want.astype(np.float32))
    if want.dtype == ml_dtypes.float8_e8m0fnu:
        return got.tobytes() == want.tobytes()
    as_bits = np.uint8 if want.dtype.itemsize == 1 else np.uint32
    equal = (got.view(as_bits) == want.view(as_bits)) | (nan & np.isnan(got.astype(np.float32)))
    return bool(equal.all())


def in_order(problem: QuantizeProblem, results: list[np.ndarray]) -> list[np.ndarray]:
    """The results as arrays, wherever their dims lie."""
    layouts = written_layouts(problem, [r.shape for r in results])
    return [
        r if order is None else r.reshape([r.shape[d] for d in order]).transpose(np.argsort(order))
        for r, order in zip(results, layouts, strict=True)
    ]
