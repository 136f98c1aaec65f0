"""What layers refuse, by name: activations, shapes, quantisers, shardings."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes

X, GAMMA, KERNEL = jnp.ones((4, 8)), jnp.ones(8), jnp.ones((8, 16))
PAIR = jnp.ones((8, 2, 16))
CURRENT, DELAYED = (
    recipe.dense_quantizers()
    for recipe in (so.recipes.CurrentScaling(), so.recipes.DelayedScaling())
)


def mlp(kernels=(KERNEL, KERNEL.T), **options):
    return so.layer_norm_mlp(X, GAMMA, kernels, **options)


REFUSED = [
    (lambda: so.dense(X, KERNEL, activation="swish"), "dense: activation is 'swish'"),
    (lambda: so.dense(X, KERNEL, activation=("silu", "linear")), "Pairs are for layer_norm_mlp"),
    (lambda: mlp(activation="tanh"), "layer_norm_mlp: activation is 'tanh'"),
    (
        lambda: mlp(activation=("tanh", "linear")),
        r"layer_norm_mlp: activation is \('tanh', 'linear'\)",
    ),
    (lambda: mlp(activation=("silu",)), "expected a pair of 'gelu'"),
    (
        lambda: mlp(activation=("silu", "linear")),
        r"kernels\[0\] is of shape \(8, 16\); expected \[d, 2, f\]",
    ),
    (lambda: mlp((PAIR, KERNEL.T)), r"kernels\[0\] is of shape \(8, 2, 16\); expected \[d, f\]"),
    (lambda: mlp((KERNEL, KERNEL)), r"kernels\[1\] is of shape \(8, 16\); expected \[f, n\]"),
    (lambda: mlp((KERNEL,)), "layer_norm_mlp: kernels is a tuple of 1"),
    (lambda: mlp(biases=jnp.ones(16)), "layer_norm_mlp: biases is a"),
    (lambda: mlp(biases=(jnp.ones(3), None)), r"layer_norm_mlp: bias is of shape \(3,\)"),
    (lambda: mlp(norm="group_norm"), "layer_norm_mlp: norm is 'group_norm'"),
    (lambda: mlp(batch_dims=((1,), ())), r"layer_norm_mlp: batch_dims is \(\(1,\), \(\)\)"),
    (lambda: mlp(batch_dims=((0,), (0,))), "layer_norm_mlp: batch_dims is"),
    (
        lambda: so.layer_norm_mlp(jnp.ones(()), GAMMA, (KERNEL, KERNEL.T)),
        r"layer_norm_mlp: x is of shape \(\)",
    ),
    (lambda: mlp(norm="rms_norm", beta=GAMMA), "layer_norm_mlp: beta is given"),
    (lambda: so.dense(X, jnp.ones((9, 16))), "dense: contracting_dims is"),
    (lambda: so.dense(X, KERNEL, jnp.ones(8)), r"dense: bias is of shape \(8,\)"),
    (lambda: so.dense(X, KERNEL, quantizers=DELAYED.input), "dense: quantizers is a Quantizer"),
    (lambda: so.dense(X, KERNEL, quantizers=(CURRENT, CURRENT)), "dense: quantizers is a tuple"),
    (
        lambda: mlp(quantizers=CURRENT),
        "layer_norm_mlp: quantizers is a DenseQuantizers; expected a pair",
    ),
    (lambda: mlp(quantizers=(CURRENT, None)), r"quantizers\[1\] is a NoneType"),
    (
        lambda: so.dense(
            X,
            KERNEL,
            quantizers=dataclasses.replace(
                DELAYED, gradient=dataclasses.replace(DELAYED.gradient, scale_inv=None)
            ),
        ),
        r"dense: quantizers.gradient is of mode .* without state",
    ),
    (
        lambda: so.dense(
            X,
            KERNEL,
            quantizers=dataclasses.replace(
                DELAYED, kernel=dataclasses.replace(DELAYED.kernel, scale_inv=jnp.ones(3))
            ),
        ),
        r"dense: quantizers.kernel is delayed state of shape \(3,\)",
    ),
    (lambda: so.dense(X, KERNEL, input_sharding=P()), "dense: input_sharding is .* None where"),
    (lambda: so.dense("x", KERNEL), "dense: x is a str"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_layers_say_what_they_want(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_an_input_is_kept_on_explicit_axes_alone():
    for kind in ("auto", "explicit-auto"):
        with meshes.entered(kind), pytest.raises(ValueError, match="dense: input_sharding is"):
            so.dense(X, KERNEL, input_sharding=P())
    with meshes.entered("explicit") as mesh:
        x = meshes.place(mesh, X, "dp")
        with pytest.raises(ValueError, match="leading axes of each dim"):
            so.dense(x, KERNEL, input_sharding=P(None, "tp"))
        with pytest.raises(ValueError, match="leading axes of each dim"):
            so.dense(x, KERNEL, input_sharding=P(None, "tp"), quantizers=CURRENT)


@pytest.mark.parametrize("of", ["x", "kernel"])
def test_a_gradient_of_a_gradient_is_refused_with_quantisers_alone(of):
    """Through the cotangent, and where that is constant through the operand."""

    def twice(quantizers, power):
        def f(x, kernel):
            return jnp.sum(so.dense(x, kernel, quantizers=quantizers) ** power)

        first = jax.grad(f, 1 if of == "x" else 0)
        return jax.jit(jax.grad(lambda x, w: jnp.sum(first(x, w)), 0 if of == "x" else 1))(
            X, KERNEL
        )

    assert jnp.all(twice(None, 1) != 0)
    for power in (1, 2):
        with pytest.raises(NotImplementedError, match="dense: quantizers are given; expected None"):
            twice(CURRENT, power)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_shardings_are_refused_by_the_names_of_the_layer(kind):
    x, odd = jnp.ones((6, 8)), P("tp", None)
    with meshes.entered(kind, {"tp": 4}):
        for argument in ("hidden_sharding", "out_sharding"):
            with pytest.raises(ValueError, match=f"layer_norm_mlp: {argument} is .* that divide"):
                so.layer_norm_mlp(x, GAMMA, (KERNEL, KERNEL.T), **{argument: odd})
        with pytest.raises(ValueError, match=r"dense: out_sharding is .* that divide"):
            so.dense(x, KERNEL, out_sharding=odd)
        with pytest.raises(ValueError, match=r"layer_norm_mlp: hidden_sharding is .* at most 2"):
            mlp(
                (PAIR, KERNEL.T), activation=("silu", "linear"), hidden_sharding=P(None, None, "tp")
            )
    with meshes.entered("explicit"), pytest.raises(ValueError, match="dense: input_sharding is"):
        so.dense(X, KERNEL, input_sharding=P(None, None, None))
