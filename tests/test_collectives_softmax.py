"""What softmax moves between devices: exact counts and bytes of the compiled program."""

import jax
import jax.numpy as jnp
import pytest

from shardops.primitives.softmax import softmax
from tests.moved import DP, TP, B, N, S, moved, size

# x is "y" of the products: [B, S, N], a batch, queries and keys; so is "residual"

ROWS = {
    "none": (),
    "batch": ("dp",),
    "queries": (None, "tp"),
    "batch and queries": ("dp", "tp"),
    "two axes on the queries": (None, ("dp", "tp")),
    "in another order": (None, ("tp", "dp")),
}

every_layout = pytest.mark.parametrize("layout", ROWS)


@every_layout
@pytest.mark.parametrize("causal", [None, "upper_left", "bottom_right"])
def test_softmax_moves_nothing(mesh, layout, causal):
    rows = ROWS[layout]

    def f(y):
        return softmax(y, causal=causal, scale=0.5)

    assert moved(mesh, f, {"y": rows}, rows) == ({}, ())


def _gradient(x, c, **options):
    return jax.grad(lambda x: jnp.sum(softmax(x, **options) * c))(x)


@every_layout
@pytest.mark.parametrize("causal", [None, "upper_left", "bottom_right"])
def test_softmax_gradient_moves_nothing(mesh, layout, causal):
    rows = ROWS[layout]

    def f(y, residual):
        return _gradient(y, residual, causal=causal)

    assert moved(mesh, f, {"y": rows, "residual": rows}, rows) == ({}, ())


@every_layout
@pytest.mark.parametrize("dims", [(B, S, N), (1, S, N), (B, 1, N), (1, 1, N)], ids=str)
def test_softmax_with_a_mask_moves_nothing(mesh, layout, dims):
    """A mask laid out as x along the dims that it has; and one that lies whole is cut for free."""
    rows = ROWS[layout]

    def f(y, residual):
        mask = residual[: dims[0], : dims[1]] > 2
        return _gradient(y, y, mask=mask)

    like_x = rows if dims == (B, S, N) else ()
    for mask in {like_x, ()}:
        assert moved(mesh, f, {"y": rows, "residual": mask}, rows) == ({}, ())


@pytest.mark.parametrize("causal", [None, "upper_left"])
def test_softmax_gathers_sharded_keys(mesh, causal):
    """One all-gather of x over the keys' axis."""

    def f(y):
        return softmax(y, causal=causal)

    got = moved(mesh, f, {"y": ("dp", None, "tp")}, ("dp",))
    assert got == ({"all-gather": (1, size(B // DP, S, N))}, (TP,))


def test_softmax_computes_a_result_with_sharded_keys_whole(auto_mesh):
    """Wanted so, it is cut: nothing moves."""
    assert moved(auto_mesh, softmax, {"y": ("dp",)}, ("dp", None, "tp")) == ({}, ())


def test_softmax_gradient_with_sharded_keys_gathers_x_once(mesh):
    """The result has whole keys, and with it what flows back; dx is cut as x is."""

    def f(y, residual):
        return _gradient(y, residual)

    layouts = {"y": ("dp", None, "tp"), "residual": ("dp",)}
    got = moved(mesh, f, layouts, ("dp", None, "tp"))
    assert got == ({"all-gather": (1, size(B // DP, S, N))}, (TP,))


def test_softmax_gradient_gathers_a_cotangent_with_sharded_keys(auto_mesh):
    """y is whole: dy alone is gathered."""

    def f(y, residual):
        return jax.vjp(softmax, y)[1](residual)[0]

    layouts = {"y": ("dp",), "residual": ("dp", None, "tp")}
    got = moved(auto_mesh, f, layouts, ("dp",))
    assert got == ({"all-gather": (1, size(B // DP, S, N))}, (TP,))


def test_softmax_with_sharded_keys_throughout_exchanges_them_for_rows(auto_mesh):
    """x, y, dy and dx all over tp: an all-to-all takes each to rows over tp or back, and y twice.
    A fourth of an array each, where gathers of x and of dy alone would move two whole ones."""

    def f(y, residual):
        out, pull = jax.vjp(softmax, y)
        return [out, pull(residual)[0]]

    keys = ("dp", None, "tp")
    got = moved(auto_mesh, f, {"y": keys, "residual": keys}, [keys, keys])
    assert got == ({"all-to-all": (5, 5 * size(B // DP, S, N // TP))}, (TP,) * 5)


@pytest.mark.parametrize("causal", [None, "upper_left"])
def test_softmax_exchanges_keys_for_rows_where_the_result_has_them_sharded(auto_mesh, causal):
    def f(y):
        return softmax(y, causal=causal)

    keys = ("dp", None, "tp")
    got = moved(auto_mesh, f, {"y": keys}, keys)
    assert got == ({"all-to-all": (2, 2 * size(B // DP, S, N // TP))}, (TP, TP))


def test_softmax_slices_by_an_axis_that_the_wanted_result_has(auto_mesh):
    """x whole over tp, y wanted with the queries over it: no device works on all of them."""

    def f(y):
        return softmax(y, causal="upper_left")

    assert moved(auto_mesh, f, {"y": ("dp",)}, ("dp", "tp")) == ({}, ())


def test_softmax_mask_does_not_decide_where_x_lies(auto_mesh):
    """A mask that is sharded where x is whole is gathered; x stays."""

    def f(y, residual):
        return softmax(y, mask=residual > 2)

    summary, groups = moved(auto_mesh, f, {"y": ("dp",), "residual": ("dp", "tp")}, ("dp",))
    assert groups == (TP,)
    assert set(summary) == {"all-gather"}
    assert summary["all-gather"][1] <= size(B // DP, S, N)
