"""What the norms move between devices: exact counts and bytes of the compiled program."""

import jax
import jax.numpy as jnp
import pytest

import shardops as so
from tests.moved import DP, TP, B, N, S, moved, size

# x is "y" of the products: [B, S, N]; gamma and beta are "vector": [N]
OPS = ("layer_norm", "rms_norm")
both = pytest.mark.parametrize("op", OPS)

ROWS = {
    "none": ((), ()),
    "data": (("dp",), (DP,)),
    "sequence": ((None, "tp"), (TP,)),
    "data and sequence": (("dp", "tp"), (DP * TP,)),
    "two axes on a dim": ((("dp", "tp"),), (DP * TP,)),
}


def forward(mesh, op, x, gamma=(), **options):
    def f(y, gamma):
        return getattr(so, op)(y, gamma, **options)

    return moved(mesh, f, {"y": x, "vector": gamma}, x)


def gradients(mesh, op, x, gamma=(), **options):
    """Of sum(norm(x, gamma[, beta]) * c), with respect to all."""

    def f(x, gamma, c):
        def loss(x, parameters):
            return jnp.sum(getattr(so, op)(x, *parameters, **options) * c)

        parameters = (gamma, gamma) if op == "layer_norm" else (gamma,)
        return jax.grad(loss, (0, 1))(x, parameters)

    one = tuple(gamma)
    out = [x, [one, one] if op == "layer_norm" else [one]]
    return moved(mesh, lambda *a: _lists(f(*a)), {"y": x, "vector": gamma, "residual": x}, out)


def _lists(tree):
    return [tree[0], list(tree[1])]


def parameters(op: str) -> int:
    return 2 if op == "layer_norm" else 1


@both
@pytest.mark.parametrize("layout", ROWS)
def test_norm_forward_moves_nothing(mesh, op, layout):
    assert forward(mesh, op, ROWS[layout][0]) == ({}, ())


@both
def test_norm_forward_with_residual_moves_nothing(mesh, op):
    def f(y, residual, gamma):
        return list(getattr(so, op)(y, gamma, add=residual, return_input=True))

    rows = ("dp", "tp")
    assert moved(mesh, f, {"y": rows, "residual": rows, "vector": ()}, [rows, rows]) == ({}, ())


@both
@pytest.mark.parametrize("layout", ROWS)
def test_norm_gradient_is_one_collective_over_the_axes_of_the_rows(mesh, op, layout):
    """dgamma and dbeta travel together; dx stays."""
    rows, groups = ROWS[layout]
    summary = {"all-reduce": (1, parameters(op) * size(N))} if groups else {}
    assert gradients(mesh, op, rows) == (summary, groups)


@both
def test_norm_gradient_scatters_where_gamma_is_sharded(mesh, op):
    """FSDP: gamma (and beta) gathered for the forward, their gradients scattered in one go."""
    summary, groups = gradients(mesh, op, ("dp",), ("dp",))
    assert summary["reduce-scatter"] == (1, parameters(op) * size(N // DP))
    assert set(summary) <= {"reduce-scatter", "all-gather"}
    assert set(groups) == {DP}


@both
def test_norm_gradient_scatters_and_reduces_the_rest(mesh, op):
    summary, _ = gradients(mesh, op, ("dp", "tp"), ("dp",))
    assert summary["reduce-scatter"] == (1, parameters(op) * size(N // DP))
    assert summary["all-reduce"] == (1, parameters(op) * size(N // DP))


# --- where the normalised dim is sharded --------------------------------------------------------


@both
def test_norm_gathers_a_sharded_row(mesh, op):
    """One all-gather of x, and none of y or gamma."""
    summary, groups = forward_whole(mesh, op, stats="gather")
    assert summary == {"all-gather": (1, size(B // DP, S, N))}
    assert groups == (TP,)


def forward_whole(mesh, op, **options):
    """h sharded in x, whole in y."""

    def f(y, gamma):
        return getattr(so, op)(y, gamma, **options)

    return moved(mesh, f, {"y": ("dp", None, "tp"), "vector": ()}, ("dp",))


@both
@pytest.mark.parametrize("stats", ["auto", "distributed"])
def test_norm_combines_statistics_of_a_sharded_row(mesh, op, stats):
    """A number a row: the mean square; for a layer norm the mean too."""
    summary, groups = forward(mesh, op, ("dp", None, "tp"), ("tp",), stats=stats)
    count = parameters(op)
    assert summary == {"all-reduce": (count, count * size(B // DP, S))}
    assert groups == (TP,) * count


@both
def test_norm_gradient_combines_sums_of_a_sharded_row(mesh, op):
    """Backward: one all-reduce of the row's sums over tp, one of the parameters' over dp."""
    summary, _ = gradients(mesh, op, ("dp", None, "tp"), ("tp",), stats="distributed")
    count = parameters(op)
    forward_sums = backward_sums = count * size(B // DP, S)
    assert summary == {
        "all-reduce": (count + 2, forward_sums + backward_sums + count * size(N // TP))
    }


@both
def test_norm_keeps_x_where_gamma_is_sharded(mesh, op):
    """gamma's layout must not decide x's: gamma alone is gathered."""
    summary, groups = forward(mesh, op, ("dp",), ("tp",))
    assert summary == {"all-gather": (1, size(N))}
    assert groups == (TP,)
