"""What gemm and dot_general move between devices: exact counts and bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from tests.moved import DP, TP, B, K, N, S, moved, size, wanted


def forward(mesh, x, w, y, long=False, **options):
    def f(x, w):
        return so.gemm(x, w, out_sharding=wanted(mesh, *y), **options)

    return moved(mesh, f, {"x_long": x, "w_long": w} if long else {"x": x, "w": w}, y)


def gradients(mesh, x, w, y, argnums=(0, 1), attributed=True, many=False, **options):
    """Of sum(gemm(x, w) * c), c laid out as the result."""

    def f(x, w, c):
        def loss(x, w):
            return jnp.sum(so.gemm(x, w, out_sharding=wanted(mesh, *y), **options) * c)

        both = jax.grad(loss, (0, 1))(x, w)
        return [both[i] for i in argnums]

    out = [(x, w)[i] for i in argnums]
    names = ("x_many", "w", "y_many") if many else ("x", "w", "y")
    layouts = dict(zip(names, (x, w, y), strict=True))
    return moved(mesh, f, layouts, out, attributed=attributed)


# --- forward ------------------------------------------------------------------------------------


def test_column_parallel_moves_nothing(any_mesh):
    assert forward(any_mesh, ("dp",), (None, "tp"), ("dp", None, "tp")) == ({}, ())


def test_row_parallel_all_reduces_the_result(any_mesh):
    got = forward(any_mesh, ("dp", None, "tp"), ("tp",), ("dp",))
    assert got == ({"all-reduce": (1, size(B // DP, S, N))}, (TP,))


def test_row_parallel_reduce_scatters_where_the_result_is_wanted_sharded(mesh):
    got = forward(mesh, ("dp", None, "tp"), ("tp",), ("dp", "tp"))
    assert got == ({"reduce-scatter": (1, size(B // DP, S // TP, N))}, (TP,))


def test_row_parallel_reduce_scatters_over_columns(mesh):
    got = forward(mesh, ("dp", None, "tp"), ("tp",), ("dp", None, "tp"))
    assert got == ({"reduce-scatter": (1, size(B // DP, S, N // TP))}, (TP,))


def test_sequence_parallel_input_gathers_x_once(mesh):
    got = forward(mesh, ("dp", "tp"), (None, "tp"), ("dp", None, "tp"))
    assert got == ({"all-gather": (1, size(B // DP, S, K))}, (TP,))


@pytest.mark.parametrize("w", [("dp",), (None, "dp")], ids=["k", "n"])
def test_fsdp_gathers_the_weight_once(mesh, w):
    got = forward(mesh, ("dp",), w, ("dp",), batch_dims=((0,), ()))
    assert got == ({"all-gather": (1, size(K, N))}, (DP,))


def test_two_axes_on_k_make_one_collective(mesh):
    got = forward(mesh, (None, None, ("dp", "tp")), (("dp", "tp"),), (), long=True)
    assert got == ({"all-reduce": (1, size(B, S, N))}, (DP * TP,))


def test_two_axes_on_k_scatter_together(mesh):
    got = forward(mesh, (None, None, ("dp", "tp")), (("dp", "tp"),), (("dp", "tp"),), long=True)
    assert got == ({"reduce-scatter": (1, size(B // DP // TP, S, N))}, (DP * TP,))


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_bias_and_activation_come_after_the_one_reduction(mesh, activation):
    def f(x, w, bias):
        return so.gemm(x, w, bias=bias, activation=activation, out_sharding=wanted(mesh, "dp"))

    got = moved(mesh, f, {"x": ("dp", None, "tp"), "w": ("tp",), "vector": ()}, ("dp",))
    assert got == ({"all-reduce": (1, size(B // DP, S, N))}, (TP,))


def test_cheapest_scatters(explicit_mesh):
    def f(x, w):
        return so.gemm(x, w, out_sharding="cheapest")

    got = moved(explicit_mesh, f, {"x": ("dp", None, "tp"), "w": ("tp",)})
    assert got == ({"reduce-scatter": (1, size(B // DP // TP, S, N))}, (TP,))


@pytest.mark.parametrize("y", [("dp",), ("dp", "tp")], ids=["whole", "scattered"])
def test_cheapest_does_what_the_partitioner_wants(auto_mesh, y):
    """A scatter that is gathered again would be no cheaper than the one all-reduce."""

    def f(x, w):
        return so.gemm(x, w, out_sharding="cheapest")

    got = moved(auto_mesh, f, {"x": ("dp", None, "tp"), "w": ("tp",)}, y)
    assert got == forward(auto_mesh, ("dp", None, "tp"), ("tp",), y)


# --- a constraint further down, which only Auto has ---------------------------------------------

SCATTERED = ({"reduce-scatter": (1, size(B // DP, S // TP, N))}, (TP,))


def _through(name, y, residual):
    if name == "relu, residual, scale":
        return (jax.nn.relu(y) + residual) * 0.5
    if name == "norm":
        return so.rms_norm(y, jnp.ones(N))
    if name == "norm of the sum":
        return so.layer_norm(y, jnp.ones(N), add=residual)
    return y


@pytest.mark.parametrize("through", ["nothing", "relu, residual, scale", "norm", "norm of the sum"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_row_parallel_scatters_for_a_constraint_downstream(auto_mesh, through, wrap):
    def f(x, w, residual):
        y = _through(through, wrap(so.gemm)(x, w), residual)
        return jax.lax.with_sharding_constraint(y, NamedSharding(auto_mesh, P("dp", "tp")))

    layouts = {"x": ("dp", None, "tp"), "w": ("tp",), "residual": ("dp", "tp")}
    assert moved(auto_mesh, f, layouts) == SCATTERED


# --- gradients ----------------------------------------------------------------------------------


def test_column_parallel_gradient_reduces_dx_over_tp_and_dw_over_dp(mesh):
    summary, groups = gradients(mesh, ("dp",), (None, "tp"), ("dp", None, "tp"))
    assert summary == {"all-reduce": (2, size(B // DP, S, K) + size(K, N // TP))}
    assert groups == (DP, TP)


def test_row_parallel_gradient_reduces_dw_over_dp_alone(mesh):
    summary, groups = gradients(mesh, ("dp", None, "tp"), ("tp",), ("dp",))
    assert summary == {"all-reduce": (1, size(K // TP, N))}
    assert groups == (DP,)


def test_row_parallel_scattered_gradient_gathers_the_cotangent_once(mesh):
    """dx and dw both need the whole sequence of dy: gathered once, not twice.

    XLA names the gather after what made dy, a product of the test's own.
    """
    summary, groups = gradients(mesh, ("dp", None, "tp"), ("tp",), ("dp", "tp"), attributed=False)
    assert summary == {
        "all-gather": (1, size(B // DP, S, N)),
        "all-reduce": (1, size(K // TP, N)),
    }
    assert groups == (DP, TP)


def test_sequence_parallel_gradient_scatters_dx(mesh):
    """x is gathered for dw, dx goes back in pieces."""
    summary, groups = gradients(mesh, ("dp", "tp"), (None, "tp"), ("dp", None, "tp"))
    assert summary == {
        "all-gather": (1, size(B // DP, S, K)),
        "reduce-scatter": (1, size(B // DP, S // TP, K)),
        "all-reduce": (1, size(K, N // TP)),
    }
    assert groups == (DP, TP, TP)


def test_weight_gradient_over_batch_and_sequence_is_one_all_reduce(mesh):
    got = gradients(mesh, ("dp", "tp"), (), ("dp", "tp"), argnums=(1,), many=True)
    assert got == ({"all-reduce": (1, size(K, N))}, (DP * TP,))


def test_weight_gradient_as_a_product_gathers_nothing(mesh):
    def f(x, dy):
        return so.gemm(
            x,
            dy,
            contracting_dims=((0, 1), (0, 1)),
            batch_dims=((0, 1), (0, 1)),
            out_sharding=wanted(mesh, None, "tp"),
        )

    got = moved(mesh, f, {"x": ("dp",), "y": ("dp", None, "tp")}, (None, "tp"))
    assert got == ({"all-reduce": (1, size(K, N // TP))}, (DP,))


@pytest.mark.parametrize("w", [("dp",), (None, "dp")], ids=["k", "n"])
def test_fsdp_gradient_reduce_scatters_dw(mesh, w):
    got = gradients(mesh, ("dp",), w, ("dp",), argnums=(1,), batch_dims=((0,), ()))
    assert got == ({"reduce-scatter": (1, size(K, N) // DP)}, (DP,))


@pytest.mark.parametrize("w", [("dp",), (None, "dp")], ids=["k", "n"])
def test_fsdp_gradient_of_both_gathers_the_weight_once(mesh, w):
    summary, groups = gradients(mesh, ("dp",), w, ("dp",), batch_dims=((0,), ()))
    assert summary == {
        "all-gather": (1, size(K, N)),
        "reduce-scatter": (1, size(K, N) // DP),
    }
    assert groups == (DP, DP)


def test_two_axes_on_k_gradient_moves_nothing(mesh):
    assert gradients(mesh, (None, None, ("dp", "tp")), (("dp", "tp"),), ()) == ({}, ())


def test_gradient_of_bias_and_activation_reduces_over_the_rows_axes(mesh):
    """Forward one sum over tp; then dw and dbias over dp, which XLA combines; dx moves nothing."""

    def f(x, w, bias, c):
        def loss(x, w, bias):
            out = so.gemm(x, w, bias=bias, activation="gelu", out_sharding=wanted(mesh, "dp"))
            return jnp.sum(out * c)

        return list(jax.grad(loss, (0, 1, 2))(x, w, bias))

    layouts = {"x": ("dp", None, "tp"), "w": ("tp",), "vector": (), "y": ("dp",)}
    summary, groups = moved(mesh, f, layouts, [("dp", None, "tp"), ("tp",), ()])
    assert summary == {"all-reduce": (2, size(B // DP, S, N) + size(K // TP, N) + size(N))}
    assert groups == (DP, TP)


# --- true batch dims ----------------------------------------------------------------------------


def test_batch_dims_of_dot_general_move_nothing(mesh):
    """Attention scores, batch over dp and heads over tp: forward and both gradients are local."""
    numbers = (((2,), (2,)), ((0, 1), (0, 1)))  # [B, S as heads, N] with the same

    def f(q, k, c):
        def loss(q, k):
            return jnp.sum(so.dot_general(q, k, numbers) * c[..., 0])

        return list(jax.value_and_grad(loss, (0, 1))(q, k)[1])

    heads = ("dp", "tp")
    got = moved(mesh, f, {"y": heads, "residual": heads, "x": heads}, [heads, heads])
    assert got == ({}, ())
