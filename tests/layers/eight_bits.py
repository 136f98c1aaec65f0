"""A dense layer of quantised operands in float64 numpy, from the formulas alone."""

import dataclasses

import ml_dtypes
import numpy as np

import shardops as so
from tests.primitives.test_scaled import oracle

RECIPES = {
    "delayed": so.recipes.DelayedScaling(amax_history_len=4),
    "current": so.recipes.CurrentScaling(),
    "block": so.recipes.Block128Scaling(),
    "mxfp8": so.recipes.MXFP8Scaling(),
}

# The rounding error of a format, relative to a value at the bottom of its binade, where it is
# largest: uniform over a step, so 1/sqrt(3) of half a step on average.
E4M3, E5M2 = 2**-4 / 3**0.5, 2**-3 / 3**0.5


def quantizers(recipe: str, *arrays, seen: float = 0.75) -> so.DenseQuantizers:
    """Of a recipe; with delayed scaling after a step that saw so much of x, kernel and dz."""
    made = RECIPES[recipe].dense_quantizers()
    roles = {
        role: getattr(made, role).update(np.float32(seen * np.abs(a).max()))
        for role, a in zip(("input", "kernel", "gradient"), arrays, strict=False)
    }
    return dataclasses.replace(made, **roles)


def rounded(x: np.ndarray, quantizer: so.Quantizer, *, columns: bool) -> np.ndarray:
    """What [rows, h] is in 8 bits: for products that contract h, or with `columns` the rows."""
    x = np.asarray(x).astype(np.float32)
    block = quantizer.block
    if quantizer.scale_inv is not None:
        scale = np.float32(quantizer.scale_inv)
        kind = np.dtype(getattr(ml_dtypes, quantizer.format))
        fmax = float(ml_dtypes.finfo(kind).max)
        scaled = np.clip(x * (np.float32(1) / scale), -fmax, fmax)
        return scaled.astype(kind).astype(np.float64) * np.float64(scale)
    if block is not None and block[0] == 1 and columns:
        block = block[::-1]
    data, scales = oracle(x, quantizer.mode, block, quantizer.format)
    for dim, size in enumerate(block or ()):
        scales = np.repeat(scales, size, dim).take(range(x.shape[dim]), dim)
    return data * scales


def dense_and_vjp(x, kernel, dz, qs):
    """y, dx and dkernel of x [rows, k], kernel [k, n] and the cotangent dz [rows, n]."""
    y = rounded(x, qs.input, columns=False) @ rounded(kernel, qs.kernel, columns=True)
    dx = rounded(dz, qs.gradient, columns=False) @ rounded(kernel, qs.kernel, columns=False).T
    dkernel = rounded(x, qs.input, columns=True).T @ rounded(dz, qs.gradient, columns=True)
    return y, dx, dkernel
