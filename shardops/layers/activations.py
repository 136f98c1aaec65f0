"""Activations of layers, of one pre-activation and gated.

Each derivative is taken of the saved pre-activation, in float32.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from shardops.errors import shown, wrong
from shardops.op import compiled, with_derivative
from shardops.primitives.gemm_op import ACTIVATIONS, Activation

Factor = Literal["gelu", "silu", "relu", "linear"]
Gated = tuple[Factor, Factor]

_SINGLE = (None, *get_args(Activation))


def check_activation(op: str, value: Any) -> None:
    """Refuse what is no activation of one product."""
    if isinstance(value, tuple | list) or value not in _SINGLE:
        want = " | ".join(repr(a) for a in _SINGLE)
        fix = "Pairs are for layer_norm_mlp." if isinstance(value, tuple | list) else "Choose one."
        raise ValueError(wrong(op, "activation", shown(value), want, fix))


def check_gated(op: str, value: Any) -> tuple[Activation | None, Gated | None]:
    """The activation of one product, or the pair; refuses what is neither."""
    if not isinstance(value, tuple | list):
        check_activation(op, value)
        return value, None
    factors = get_args(Factor)
    if len(value) != 2 or any(factor not in factors for factor in value):
        want = f"a pair of {' | '.join(map(repr, factors))}"
        fix = "The first is of kernels[0][:, 0], the second of kernels[0][:, 1]."
        raise ValueError(wrong(op, "activation", shown(value), want, fix))
    return None, (value[0], value[1])


def activate(activation: Activation | None, pre: jax.Array) -> jax.Array:
    """activation(pre), rounded to the dtype of pre."""
    return pre if activation is None else _compiled_activate(activation, None, pre)


@with_derivative
def _activate(activation: Activation, _: None, pre: jax.Array) -> jax.Array:
    return _function(activation)(pre.astype(jnp.float32)).astype(pre.dtype)


def _slope(activation: Activation, _: None, pre: jax.Array, dout: jax.Array) -> tuple[jax.Array]:
    wide = _apart(pre).astype(jnp.float32)
    (dpre,) = jax.vjp(_function(activation), wide)[1](dout.astype(jnp.float32))
    return (_apart(dpre.astype(pre.dtype)),)


def _apart(array: jax.Array) -> jax.Array:
    """Keeps the backward pass to itself.

    Of its operand XLA would otherwise keep, in float32, what the forward pass computes of it too;
    its result XLA would write in float32 for the sum that is the gradient of a bias, and round in
    another pass.
    """
    return jax.lax.optimization_barrier(array)


_activate.defvjp(lambda a, _, pre: (_activate(a, None, pre), pre), _slope)
_compiled_activate = compiled(_activate)


def gated(activations: Gated, pre: jax.Array) -> jax.Array:
    """a0(pre[..., 0, f]) * a1(pre[..., 1, f]), rounded once."""
    return _compiled_gated(activations, None, pre)


def _gelu(z: jax.Array) -> jax.Array:
    """The tanh approximation, of exp: (1 + tanh(u)) / 2 = sigmoid(2 u), in fewer instructions."""
    return z * jax.nn.sigmoid(2 * (2 / math.pi) ** 0.5 * (z + 0.044715 * z**3))


def _function(name: Factor) -> Callable[[jax.Array], jax.Array]:
    return _gelu if name == "gelu" else ACTIVATIONS.get(name, lambda z: z)


def _wide_gated(activations: Gated, one: jax.Array, other: jax.Array) -> jax.Array:
    return _function(activations[0])(one) * _function(activations[1])(other)


def _halves(pre: jax.Array) -> list[jax.Array]:
    wide = pre.astype(jnp.float32)
    return [jax.lax.index_in_dim(wide, i, axis=-2, keepdims=False) for i in range(2)]


@with_derivative
def _gated(activations: Gated, _: None, pre: jax.Array) -> jax.Array:
    return _wide_gated(activations, *_halves(pre)).astype(pre.dtype)


def _pull_gated(activations: Gated, _: None, pre: jax.Array, dout: jax.Array) -> tuple[jax.Array]:
    """Each element sees both halves, and is its own: XLA writes the two halves of a stack in one
    kernel only where they share no tanh."""

    def of(one: jax.Array, other: jax.Array) -> jax.Array:
        return _wide_gated(activations, one, other)

    wide = _apart(pre).astype(jnp.float32)
    axis = pre.ndim - 2
    swapped = jax.lax.rev(wide, (axis,))
    first = jnp.zeros_like(pre, jnp.int32) + jnp.arange(2)[:, None] == 0  # sharded as pre is
    halves = jnp.where(first, wide, swapped), jnp.where(first, swapped, wide)
    dwide = jnp.expand_dims(dout.astype(jnp.float32), axis) + jnp.zeros_like(wide)
    both = jax.vjp(of, *halves)[1](dwide)
    return (_apart(jnp.where(first, *both).astype(pre.dtype)),)


_gated.defvjp(lambda a, _, pre: (_gated(a, None, pre), pre), _pull_gated)
_compiled_gated = compiled(_gated)
