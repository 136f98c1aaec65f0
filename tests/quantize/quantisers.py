"""Quantisers of the tests, and comparison by bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import shardops as so
from shardops.primitives.scaled import quantize_reference

R = so.recipes
RECIPES = {
    "delayed": R.DelayedScaling(amax_history_len=4),
    "current": R.CurrentScaling(),
    "block": R.Block128Scaling(),
    "mxfp8": R.MXFP8Scaling(),
}
LAYOUTS = ("rows", "columns", "both")
ROLES = ("input", "kernel", "gradient")

# half a step relative to a normal value, half a step of subnormal values, largest value
FORMATS = {
    "float8_e4m3fn": (2.0**-4, 2.0**-10, 448.0),
    "float8_e5m2": (2.0**-3, 2.0**-17, 57344.0),
}


def wide_range(rng, shape, dtype=np.float32):
    """Magnitudes over many octaves: scales of blocks differ, some elements are subnormal."""
    return (rng.standard_normal(shape) * np.exp2(rng.uniform(-20, 12, shape))).astype(dtype)


def bits(tree) -> list[tuple]:
    """Type, shape and bytes of each array."""
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return [(a.dtype.name, a.shape, a.tobytes()) for a in leaves]


def parts(scaled: so.ScaledArray) -> list[so.ScaledArray]:
    """What it holds: rows, columns or both."""
    own = [scaled] if scaled.data is not None else []
    return own + [scaled.transposed] * (scaled.transposed is not None)


def by_reference(x, quantizer: so.Quantizer) -> so.ScaledArray:
    """What `so.quantize` is to give, on one device, composed of the reference alone."""

    @jax.jit
    def run(x, given):
        rank, block = x.ndim, quantizer.block
        out = {}
        for name, array in (("rows", x), ("columns", jnp.moveaxis(x, -1, 0))):
            if quantizer.layout not in (name, "both"):
                continue
            blocks = None
            if block is not None and block[0] > 1:
                at = (rank - 2, rank - 1) if name == "rows" else (0, rank - 1)
                blocks = tuple(block[0] if d in at else 1 for d in range(rank))
            elif block is not None:
                blocks = (1,) * (rank - 1) + (block[1],)
            out[name] = quantize_reference(
                array, quantizer.mode, blocks, quantizer.format, scale_inv=given
            )
        return out

    done = run(x, quantizer.scale_inv)
    rows, columns = done.get("rows"), done.get("columns")
    first = rows or columns
    tensor = quantizer.block is None
    block = None
    if not tensor:
        block = ((1,) * x.ndim + quantizer.block)[-x.ndim :]
    return so.ScaledArray(
        None if rows is None else rows.data,
        first.scale_inv if tensor else None if rows is None else rows.scale_inv,
        first.amax if tensor else None,
        quantizer.mode,
        x.dtype,
        block,
        None if columns is None else columns.data,
        None if columns is None or tensor else columns.scale_inv,
    )


def float64(array) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)
    return array.astype(np.float64)
