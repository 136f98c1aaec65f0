"""What is fused, what nearly is and why, on one device: counted in the traced program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from tests.closeness import assert_close
from tests.fuse.programs import (
    DIM,
    HIDDEN,
    assert_same,
    block,
    draw,
    kinds,
    loss_of,
    ops_in,
    parameters,
    two_blocks,
)

pytestmark = pytest.mark.usefixtures("one_device")

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.fixture
def x(rng):
    return draw(rng, 4, 8, DIM)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_two_blocks_become_their_fused_ops(rng, dtype) -> None:
    p, x = parameters(rng, dtype), draw(rng, 4, 8, DIM, dtype=dtype)
    report = assert_same(two_blocks, p, x, roundings=12)
    assert kinds(report) == {"return_input": 1, "add": 1, "bias+activation": 2}
    assert report.missed == ()
    before = ops_in(jax.make_jaxpr(jax.grad(loss_of(two_blocks)))(p, x))
    after = ops_in(jax.make_jaxpr(jax.grad(loss_of(so.fuse(two_blocks))))(p, x))
    assert (before["backward"], before["backward, residual"], before["norm, add"]) == (2, 0, 0)
    assert (after["backward"], after["backward, residual"], after["norm, add"]) == (0, 2, 1)
    assert before["gemm, gelu_aux of bias"] == 0
    assert after["gemm, gelu_aux of bias"] == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_sum_is_the_same_bit_for_bit(rng, dtype) -> None:
    """The op rounds the sum as the equation does."""
    gamma = draw(rng, DIM, dtype=dtype)
    a, b = (draw(rng, 4, DIM, dtype=dtype) for _ in "ab")

    def norm_of_sum(gamma, a, b):
        s = a + b
        return so.layer_norm(s, gamma, gamma), s

    fused = so.fuse(norm_of_sum)
    (y, s), (wanted_y, wanted_s) = fused(gamma, a, b), norm_of_sum(gamma, a, b)
    np.testing.assert_array_equal(np.asarray(s), np.asarray(wanted_s))
    assert_close(y, np.asarray(wanted_y, np.float64), reduced=DIM)
    assert kinds(fused.report) == {"add": 1}


def test_backward_adds_the_branch_before_it_rounds(rng) -> None:
    """In bfloat16 the fused gradient is nearer to that in float32 than the sum of two arrays."""
    wide = [draw(rng, 64, DIM), draw(rng, DIM)]
    narrow = [a.astype(jnp.bfloat16) for a in wide]

    def residual(x, gamma):
        return so.rms_norm(x, gamma) + x * 3

    exact = jax.grad(loss_of(residual))(*(a.astype(jnp.float32) for a in narrow))
    apart, fused = (jax.grad(loss_of(f))(*narrow) for f in (residual, so.fuse(residual)))
    error = [float(jnp.abs(g.astype(jnp.float32) - exact).mean()) for g in (apart, fused)]
    assert error[1] < 0.9 * error[0]


def test_a_sum_used_by_the_norm_alone_is_not_returned(rng) -> None:
    report = assert_same(
        lambda a, b, g: so.rms_norm(a + b, g), draw(rng, 4, DIM), draw(rng, 4, DIM), draw(rng, DIM)
    )
    assert [f.what for f in report.fused] == ["add, of float32[4,16]"]


def test_uses_before_the_norm_come_after_it(rng) -> None:
    """A branch that was taken first still gets what the norm returns."""

    def early(x, gamma):
        branch = jnp.sin(x)
        return so.rms_norm(x, gamma) * branch

    args = draw(rng, 4, DIM), draw(rng, DIM)
    assert kinds(assert_same(early, *args)) == {"return_input": 1}
    assert cotangents_added(early, *args) == 1
    assert cotangents_added(so.fuse(early), *args) == 0


def cotangents_added(fn, *args) -> int:
    """Sums of cotangents that JAX puts into a gradient, for values that are used twice."""
    return str(jax.make_jaxpr(jax.grad(loss_of(fn)))(*args)).count("= add_any")


def test_norms_of_one_input_are_a_chain(rng) -> None:
    def parallel(x, gamma, beta):
        return x + so.rms_norm(x, gamma) * so.layer_norm(x, gamma, beta)

    args = draw(rng, 4, DIM), draw(rng, DIM), draw(rng, DIM)
    assert kinds(assert_same(parallel, *args)) == {"return_input": 2}
    after = ops_in(jax.make_jaxpr(jax.grad(loss_of(so.fuse(parallel))))(*args))
    assert (after["backward, residual"], after["backward"]) == (2, 0)


def test_parameters_made_of_the_input_keep_it(rng) -> None:
    """An adaptive gamma needs x before the norm; other uses still come after it."""

    def adaptive(x, w):
        gamma = jnp.tanh(x.mean(0)) @ w
        return x + so.rms_norm(x, gamma)

    args = draw(rng, 4, DIM), draw(rng, DIM, DIM)
    assert kinds(assert_same(adaptive, *args)) == {"return_input": 1}


def test_two_norms_with_parameters_of_each_other(rng) -> None:
    """Not both branches can come after both norms: one keeps its input, and there is an order."""

    def crossed(a, b):
        left, right = jnp.tanh(a.mean(0)), jnp.tanh(b.mean(0))
        return so.rms_norm(a, right) * so.rms_norm(b, left) + a + b

    assert assert_same(crossed, draw(rng, 4, DIM), draw(rng, 4, DIM)).count("return_input") == 2


def test_what_has_no_gradient_is_no_branch(rng) -> None:
    def watched(x, gamma):
        return so.rms_norm(x, gamma), jnp.argmax(x), jax.lax.stop_gradient(x) > 0

    args = draw(rng, 4, DIM), draw(rng, DIM)
    assert so.fuse(watched).explain(*args).fused == ()


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("dtype, bias", [*((d, True) for d in DTYPES), (jnp.float32, False)])
def test_epilogues(rng, activation, dtype, bias) -> None:
    def dense(x, w, b):
        z = so.gemm(x, w)
        return getattr(jax.nn, activation)(z + b if bias else z)

    args = [draw(rng, *s, dtype=dtype) for s in ((4, 8, DIM), (DIM, HIDDEN), (HIDDEN,))]
    report = assert_same(dense, *args, roundings=12)
    assert kinds(report) == {"bias+activation" if bias else "activation": 1}
    assert [f.what for f in report.fused] == ["bias, " * bias + f'activation="{activation}"']


def test_activations_written_out_are_found(x, p) -> None:
    def silu(x, w):
        z = so.gemm(x, w)
        return jax.nn.sigmoid(z) * z

    assert kinds(assert_same(silu, x, p["up"])) == {"activation": 1}


def test_a_bias_in_every_form(x, p) -> None:
    b = p["up_bias"]
    for form in (
        lambda b: b,
        lambda b: b[None, None],
        lambda b: jnp.broadcast_to(b, (4, 8, HIDDEN)),
        lambda b: jnp.reshape(b, (1, 1, -1)),
    ):
        report = assert_same(lambda x, w, b, form=form: so.gemm(x, w) + form(b), x, p["up"], b)
        assert kinds(report) == {"bias": 1}
    heads = draw(np.random.default_rng(0), DIM, 2, HIDDEN)
    bias = heads[0]
    assert kinds(assert_same(lambda x, w, b: b + so.gemm(x, w), x, heads, bias)) == {"bias": 1}


def test_dot_general_with_batch_dims(rng) -> None:
    numbers = (((2,), (1,)), ((0,), (0,)))

    def experts(x, w, b):
        return jax.nn.relu(so.dot_general(x, w, numbers) + b)

    args = draw(rng, 3, 8, DIM), draw(rng, 3, DIM, HIDDEN), draw(rng, HIDDEN)
    assert kinds(assert_same(experts, *args)) == {"bias+activation": 1}


def test_a_bias_for_each_row_is_none(rng) -> None:
    def rows(x, w, b):
        return so.gemm(x, w) + b[:, None]

    args = draw(rng, DIM, DIM), draw(rng, DIM, DIM), draw(rng, DIM)
    assert so.fuse(rows).explain(*args).fused == ()


def test_a_residual_of_one_row_is_no_bias(rng) -> None:
    """It has a bias's size, and is the norm's to add; what was repeated over the row is a bias."""

    def residual(r, x, w, g):
        s = r + so.gemm(x, w)
        return so.rms_norm(s, g) + s

    r, x, w = draw(rng, 1, HIDDEN), draw(rng, 1, DIM), draw(rng, DIM, HIDDEN)
    bias = draw(rng, HIDDEN)
    assert kinds(assert_same(residual, r, x, w, bias)) == {"add": 1}
    for form in (lambda b: b, lambda b: b[None]):
        report = assert_same(lambda x, w, b, form=form: so.gemm(x, w) + form(b), x, w, bias)
        assert kinds(report) == {"bias": 1}


def test_bias_stays_fused_where_the_activation_cannot(x, p) -> None:
    def shown(x, w, b):
        z = so.gemm(x, w) + b
        return jax.nn.gelu(z), z

    report = assert_same(shown, x, p["up"], p["up_bias"])
    assert kinds(report) == {"bias": 1}
    assert [m.why for m in report.missed] == ["what gelu is taken of is also returned"]


def test_a_norm_that_is_fused_already_is_left_alone(rng) -> None:
    def by_hand(a, b, gamma):
        y, s = so.rms_norm(a, gamma, add=b, return_input=True)
        return y + s

    args = draw(rng, 4, DIM), draw(rng, 4, DIM), draw(rng, DIM)
    fused = so.fuse(by_hand)
    assert str(jax.make_jaxpr(fused)(*args)) == str(jax.make_jaxpr(by_hand)(*args))
    assert str(fused.report) == "nothing to fuse"


def test_a_returned_input_takes_a_sum_too(rng) -> None:
    def half_by_hand(a, b, gamma):
        s = a + b
        y, h = so.rms_norm(s, gamma, return_input=True)
        return y + h, s

    args = draw(rng, 4, DIM), draw(rng, 4, DIM), draw(rng, DIM)
    assert kinds(assert_same(half_by_hand, *args)) == {"add": 1}


def test_fused_twice_is_fused_once(p, x) -> None:
    twice = so.fuse(so.fuse(two_blocks))
    np.testing.assert_array_equal(np.asarray(twice(p, x)), np.asarray(so.fuse(two_blocks)(p, x)))
    assert twice.report.fused == ()


def test_statics_of_the_ops_are_kept(rng) -> None:
    """Epsilon, zero-centred gamma, and the kernels that a block chose."""

    def odd(x, gamma):
        with so.use_kernels(""):
            y = so.layer_norm(x, gamma, epsilon=0.5, zero_centered_gamma=True)
        return x + y

    args = draw(rng, 4, DIM), draw(rng, DIM)
    assert kinds(assert_same(odd, *args)) == {"return_input": 1}
    text = str(jax.make_jaxpr(so.fuse(odd))(*args))
    assert "kernel=False" in text
    assert "kernel=True" not in text


def test_report_names_line_and_op(x, p) -> None:
    fused = so.fuse(partial(block, p))
    with pytest.raises(ValueError, match="fuse: report is asked for; expected a call before it"):
        _ = fused.report
    report = fused.explain(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert report == fused.report
    assert report.count("return_input", "rms_norm") == report.count("return_input") == 1
    lines = str(report).splitlines()
    assert all(line.startswith("fused: programs.py:") for line in lines)
    assert lines[1].endswith("rms_norm: float32[4,8,16] goes on to `add`")


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="fuse: fn is a int; expected a callable"):
        so.fuse(3)
    with pytest.raises(TypeError, match=r"fuse: the result\[1\] is a object; expected arrays"):
        so.fuse(lambda x: (x, object()))(jnp.ones(3))
