"""Which part of a quantised array a product takes: the one that lies along what is contracted."""

import jax
import numpy as np
import pytest

import shardops as so
from tests.closeness import assert_close
from tests.kernels.scaled_calls import in_float64
from tests.quantize.quantisers import RECIPES

B, S, H, N = 2, 128, 256, 384


def quantised(rng, shape, role, layout, recipe="block"):
    """With 1 x 128 blocks rows and columns of one array stand for different numbers."""
    quantizer = RECIPES[recipe].quantizer(role, layout=layout)
    x = rng.standard_normal(shape).astype(np.float32)
    return jax.jit(lambda x, q: so.quantize(x, q).detach())(x, quantizer)


def check(lhs, rhs, dims, want):
    got = jax.jit(lambda a, b: so.gemm(a, b, contracting_dims=dims))(lhs, rhs)
    assert_close(got, want, reduced=S * H)


def test_columns_are_taken_where_rows_are_contracted(rng):
    x, dy = (quantised(rng, (B, S, n), "input", "both") for n in (H, N))
    columns = [in_float64(a.transposed) for a in (x, dy)]
    assert np.abs(columns[0] - np.moveaxis(in_float64(x), -1, 0)).max() > 1e-3
    want = np.einsum("hbs,nbs->hn", *columns)
    check(x, dy, ((0, 1), (0, 1)), want)
    check(x, dy, ((1, 0), (1, 0)), want)


def test_rows_are_taken_where_the_last_dim_is_contracted(rng):
    x, w = (quantised(rng, (n, H), "input", "both") for n in (S, N))
    check(x, w, ((1,), (1,)), in_float64(x) @ in_float64(w).T)


@pytest.mark.parametrize("dims", [((0,), (0,)), ((1,), (0,))])
def test_rows_are_taken_where_the_order_of_free_dims_would_change(rng, dims):
    """Of [b, s, h] columns are [h, b, s]: with s or b free, the result's dims would be swapped."""
    x = quantised(rng, (B, S, H), "input", "both")
    w = quantised(rng, ((B, S)[dims[0][0]], N), "input", "rows")
    want = np.tensordot(in_float64(x), in_float64(w), axes=dims)
    check(x, w, dims, want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
def test_any_layout_serves_any_product(rng, recipe, layout):
    x = quantised(rng, (S, H), "input", layout, recipe)
    w = quantised(rng, (H, N), "kernel", layout, recipe)
    rows = x.upright() if layout == "columns" else x
    columns = w.transposed if layout != "rows" else None
    right = in_float64(w) if columns is None else in_float64(columns).T
    check(x, w, ((1,), (0,)), in_float64(rows) @ right)


def test_the_part_that_is_not_taken_leaves_no_trace(rng):
    w = quantised(rng, (H, N), "kernel", "both", "current")
    x = quantised(rng, (S, H), "input", "rows", "current")
    text = jax.jit(so.gemm).lower(x, w).as_text()
    assert f"tensor<{N}x{H}xf8E4M3FN>" in text
    assert "stablehlo.transpose" not in text
