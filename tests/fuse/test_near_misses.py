"""What is nearly fused, and why it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardops as so
from tests.fuse.programs import (
    DIM,
    assert_same,
    draw,
)

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def x(rng):
    return draw(rng, 4, 8, DIM)


def missed(fn, *args) -> str:
    """The one reason why nothing is fused."""
    report = so.fuse(fn).explain(*args)
    assert report.fused == ()
    (miss,) = report.missed
    return miss.why


@pytest.mark.parametrize(
    ("want", "fn"),
    {
        "sum is float32, norm input bfloat16": lambda x, p: so.rms_norm(
            (x + 2 * x).astype(jnp.bfloat16), p["gamma"]
        ),
        "the residual branch is float32, norm input bfloat16": lambda x, p: (
            x + so.rms_norm(x.astype(jnp.bfloat16), p["gamma"])
        ),
        "a term of the sum before it is broadcast": lambda x, p: so.rms_norm(
            x + p["gamma"], p["gamma"]
        ),
        "`name` stands between the sum and the norm": lambda x, p: so.rms_norm(
            checkpoint_name(x + 2 * x, "stream"), p["gamma"]
        ),
        "the sum before it is also used by the norm's own parameters": lambda x, p: so.rms_norm(
            (s := x + 2 * x), s[0, 0]
        ),
        "its input is otherwise used by the norm's own parameters alone": lambda x, p: so.rms_norm(
            x, x[0, 0]
        ),
        "its result is quantised to float8_e4m3fn by equations of its own": lambda x, p: jnp.clip(
            so.rms_norm(x, p["gamma"]) * 3, -448, 448
        ).astype(jnp.float8_e4m3fn),
        "the product before its bias is also returned": lambda x, p: (
            (z := so.gemm(x, p["up"])),
            z + p["up_bias"],
        ),
        "the product before its bias is also used by `sin`": lambda x, p: (
            (z := so.gemm(x, p["up"])) + p["up_bias"],
            jnp.sin(z),
        ),
        "what gelu is taken of is also returned": lambda x, p: (
            (z := so.gemm(x, p["up"])),
            jax.nn.gelu(z),
        ),
        "the activation is exact gelu; the epilogue has gelu (tanh), silu and relu": lambda x, p: (
            jax.nn.gelu(so.gemm(x, p["up"]), approximate=False)
        ),
        "a cast to bfloat16 stands between the product and silu": lambda x, p: jax.nn.silu(
            so.gemm(x, p["up"]).astype(jnp.bfloat16)
        ),
        "a cast to float32 stands between the product and its bias": lambda x, p: (
            so.gemm(x.astype(jnp.bfloat16), p["up"].astype(jnp.bfloat16)) + p["up_bias"]
        ),
        "the activation is maximum(z, 0), whose derivative at 0 is not that of relu; the epilogue "
        "has gelu (tanh), silu and relu": lambda x, p: jnp.maximum(so.gemm(x, p["up"]), 0),
        "`name` stands between the product and relu": lambda x, p: jax.nn.relu(
            checkpoint_name(so.gemm(x, p["up"]), "hidden")
        ),
        "it is under vmap or a gradient; fuse the function inside of that": lambda x, p: jax.vmap(
            lambda x: x + so.rms_norm(x, p["gamma"])
        )(x),
    }.items(),
)
def test_near_misses_say_why(x, p, want, fn) -> None:
    assert missed(fn, x, p) == want
    for got, wanted in zip(
        jax.tree.leaves(so.fuse(fn)(x, p)), jax.tree.leaves(fn(x, p)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_relu_by_another_derivative_is_no_relu(x, p) -> None:
    """`maximum(z, 0)` has the derivative 1/2 at 0; a user's own relu whatever the user says."""

    @jax.custom_jvp
    def relu(z):
        return jax.nn.relu(z)

    relu.defjvp(lambda z, dz: (relu(*z), 2 * dz[0]))
    for activation in (relu, lambda z: jnp.maximum(z, 0)):
        fn = lambda x, w, a=activation: a(so.gemm(x, w))  # noqa: E731
        assert so.fuse(fn).explain(x, p["up"]).fused == ()


def test_a_function_with_the_rule_of_relu_is_no_relu(x, p) -> None:
    """A straight-through estimator: its rule is relu's in all, its value another function's."""

    @jax.custom_jvp
    def rounded(z):
        return jnp.round(jnp.maximum(z, 0) * 4) / 4

    @rounded.defjvp
    def _(primals, tangents):
        (z,), (dz,) = primals, tangents
        return jax.nn.relu(z), jax.lax.select(z > 0, dz, jax.lax.full_like(dz, 0))

    report = assert_same(lambda x, w: rounded(so.gemm(x, w)), x, p["up"])
    assert report.fused == ()
