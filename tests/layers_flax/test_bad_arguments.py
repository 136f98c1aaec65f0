"""Arguments of modules that are wrong are named, with the module, the value and the fix."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import shardops as so
from shardops.layers import drop_in, linen, presets
from shardops.layers import nnx as of_nnx
from shardops.layers.attention import attention, rotary

RNGS = nnx.Rngs(0)
KEY = jax.random.key(0)
X = jnp.ones((2, 4, 8))
Q = jnp.ones((2, 4, 4, 8))


def linen_layer(*sizes, **options):
    return linen.TransformerLayer(*sizes, **options).init(KEY, X)


REFUSED = {
    "heads": (
        lambda: of_nnx.TransformerLayer(8, 3, 16, rngs=RNGS),
        "TransformerLayer: num_heads is 3; expected a divisor of the 8 features",
    ),
    "order": (
        lambda: of_nnx.TransformerLayer(8, 4, 16, batch_first=None, rngs=RNGS),
        "TransformerLayer: batch_first is",
    ),
    "rows without a batch": (
        lambda: of_nnx.LayerNormMLP(8, 16, batch_first=False, rngs=RNGS)(X[0]),
        "LayerNormMLP: x is of shape (4, 8); expected [sequence, batch, features]",
    ),
    "kv in another order": (
        lambda: of_nnx.MultiHeadAttention(4, 8, batch_first=False, rngs=RNGS)(X, X[:, :3]),
        "kv is of shape (2, 3, 8); expected [length, batch, features] with the batch of x, 4",
    ),
    "heads, linen": (lambda: linen_layer(3, 16), "TransformerLayer: num_heads is 3"),
    "no heads": (lambda: of_nnx.MultiHeadAttention(0, 8, rngs=RNGS), "num_heads is 0"),
    "groups": (
        lambda: of_nnx.MultiHeadAttention(4, 8, num_kv_heads=3, rngs=RNGS),
        "MultiHeadAttention: num_kv_heads is 3; expected a divisor of num_heads, 4",
    ),
    "odd heads": (
        lambda: linen_layer(8, 16, rope_theta=1e4),
        "TransformerLayer: head_dim is 1; expected an even number",
    ),
    "kind": (
        lambda: of_nnx.TransformerLayer(8, 2, 16, kind="both", rngs=RNGS),
        "TransformerLayer: kind is 'both'; expected 'decoder' | 'encoder'",
    ),
    "norm": (
        lambda: of_nnx.TransformerLayer(8, 2, 16, norm="batch", rngs=RNGS),
        "TransformerLayer: norm is 'batch'; expected 'layer_norm' | 'rms_norm'",
    ),
    "norm, linen": (lambda: linen_layer(2, 16, norm="batch"), "TransformerLayer: norm is 'batch'"),
    "activation": (
        lambda: of_nnx.LayerNormMLP(8, 16, activation="tanh", rngs=RNGS),
        "LayerNormMLP: activation is 'tanh'",
    ),
    "gate": (
        lambda: linen.LayerNormMLP(16, activation=("silu", "tanh")).init(jax.random.key(0), X),
        "LayerNormMLP: activation is ('silu', 'tanh')",
    ),
    "rank of x": (
        lambda: of_nnx.TransformerLayer(8, 2, 16, rngs=RNGS)(X[0]),
        "self_attention: x is of shape (4, 8); expected [batch, length, 8]",
    ),
    "features of keys": (
        lambda: of_nnx.MultiHeadAttention(2, 8, in_kv_features=6, rngs=RNGS)(X),
        "self_attention: kv is of shape (2, 4, 8); expected [batch, length, 6]",
    ),
    "list": (
        lambda: of_nnx.MultiHeadAttention(2, 8, mask_kind="padding", rngs=RNGS)(X, lengths=[3, 4]),
        "self_attention: lengths is a list; expected an array",
    ),
    "positions": (
        lambda: of_nnx.MultiHeadAttention(2, 8, rngs=RNGS)(X, positions=jnp.arange(4)),
        "self_attention: positions is given, where there is no rope_theta",
    ),
    "theta": (
        lambda: of_nnx.TransformerLayer(8, 2, 16, rope_theta=0.0, rngs=RNGS),
        "TransformerLayer: rope_theta is 0.0; expected a positive number",
    ),
    "recipe": (
        lambda: of_nnx.Dense(8, 8, recipe=so.recipes.CurrentScaling, rngs=RNGS)(X),
        "Dense: recipe is the class CurrentScaling; expected one of so.recipes",
    ),
    "mask kind": (
        lambda: of_nnx.MultiHeadAttention(2, 8, mask_kind="diagonal", rngs=RNGS),
        "MultiHeadAttention: mask_kind is 'diagonal'",
    ),
    "lengths missing": (
        lambda: of_nnx.MultiHeadAttention(2, 8, mask_kind="padding", rngs=RNGS)(X),
        "attention: lengths is None; expected int32 [batch]",
    ),
    "lengths unasked": (
        lambda: attention(Q, Q, Q, lengths=jnp.ones(2, int)),
        'expected None with mask_kind="none"',
    ),
    "lengths of another batch": (
        lambda: attention(Q, Q, Q, mask_kind="padding", lengths=jnp.ones(3, int)),
        "attention: lengths is int32 of shape (3,)",
    ),
    "mask": (
        lambda: attention(Q, Q, Q, mask=jnp.ones((2, 1, 4, 5), bool)),
        "attention: mask is of shape (2, 1, 4, 5)",
    ),
    "keys": (lambda: attention(Q, Q[:, :, :3], Q[:, :, :3]), "attention: key is of shape"),
    "rank": (lambda: attention(X, X, X), "attention: query is of shape (2, 4, 8)"),
    "positions of another length": (
        lambda: of_nnx.MultiHeadAttention(2, 8, rope_theta=1e4, rngs=RNGS)(
            X, positions=jnp.ones(3)
        ),
        "rotary: positions is of shape (3,)",
    ),
    "input dims": (
        lambda: of_nnx.Dense(8, 3, rngs=RNGS)(X[..., :7]),
        "Dense: x is of shape (2, 4, 7); expected (8,) along dims (-1,)",
    ),
    "axis": (lambda: of_nnx.Dense((4, 8), 3, rngs=RNGS), "Dense: axis is -1; expected 2 dims"),
    "logical axes": (
        lambda: of_nnx.Dense(8, 3, kernel_axes=("embed",), rngs=RNGS),
        "Dense: kernel_axes is ('embed',); expected 2 entries",
    ),
    "features 0": (
        lambda: of_nnx.Dense(8, 0, rngs=RNGS),
        "Dense: features is 0; expected at least 1",
    ),
    "features -1": (
        lambda: linen.Dense((3, -1)).init(KEY, X),
        "Dense: features is -1; expected at least 1",
    ),
    "features 6.0": (
        lambda: of_nnx.Dense(8, 6.0, rngs=RNGS),
        "Dense: features is 6.0; expected an int",
    ),
    "features True": (
        lambda: linen.Dense(True).init(KEY, X),
        "Dense: features is True; expected an int",
    ),
    "features in": (
        lambda: of_nnx.Dense("8", 6, rngs=RNGS),
        "Dense: in_features is '8'; expected an int",
    ),
    "activation of dense": (
        lambda: of_nnx.Dense(8, 6, activation="tanh", rngs=RNGS),
        "Dense: activation is 'tanh'; expected None | 'gelu'",
    ),
    "activation of a norm's dense": (
        lambda: linen.LayerNormDense(6, activation=("silu", "linear")).init(KEY, X),
        "LayerNormDense: activation is ('silu', 'linear')",
    ),
    "a list in a gate": (
        lambda: of_nnx.LayerNormMLP(8, 16, activation=(["silu"], "gelu"), rngs=RNGS),
        "LayerNormMLP: activation is (['silu'], 'gelu')",
    ),
    "activation of a layer, linen": (
        lambda: linen_layer(2, 16, activation="tanh"),
        "TransformerLayer: activation is 'tanh'",
    ),
    "hidden features": (
        lambda: linen_layer(2, 3.5),
        "TransformerLayer: hidden_features is 3.5; expected an int",
    ),
    "hidden features, nnx": (
        lambda: of_nnx.TransformerLayer(8, 2, None, rngs=RNGS),
        "TransformerLayer: hidden_features is a NoneType; expected an int",
    ),
    "features of a norm": (
        lambda: of_nnx.LayerNorm(0, rngs=RNGS),
        "LayerNorm: num_features is 0; expected at least 1",
    ),
    "heads by name": (
        lambda: of_nnx.MultiHeadAttention("2", 8, rngs=RNGS),
        "MultiHeadAttention: num_heads is '2'; expected an int",
    ),
    "key heads": (
        lambda: linen_layer(2, 16, num_kv_heads=0),
        "TransformerLayer: num_kv_heads is 0; expected at least 1",
    ),
    "one head that is True": (
        lambda: linen_layer(True, 16),
        "TransformerLayer: num_heads is True; expected an int",
    ),
    "heads of no features": (
        lambda: of_nnx.MultiHeadAttention(2, 8, head_dim=0, rngs=RNGS),
        "MultiHeadAttention: head_dim is 0; expected at least 1",
    ),
    "heads that do not divide features": (
        lambda: linen.MultiHeadAttention(3).init(KEY, X),
        "MultiHeadAttention: num_heads is 3; expected a divisor of the 8 features",
    ),
    "theta by name": (
        lambda: linen_layer(2, 16, rope_theta="1e4"),
        "TransformerLayer: rope_theta is '1e4'; expected a positive number",
    ),
    "infinite theta": (
        lambda: linen_layer(2, 16, rope_theta=float("inf")),
        "TransformerLayer: rope_theta is inf; expected a positive number",
    ),
    "positions that are none": (
        lambda: rotary(Q, 1e4, jnp.ones(4, bool)),
        "rotary: positions is of dtype bool; expected integers or floats",
    ),
    "dtype": (
        lambda: of_nnx.Dense(8, 3, dtype=jnp.int32, rngs=RNGS),
        "Dense: dtype is int32; expected float32 | bfloat16 | float16",
    ),
    "dtype that is none": (
        lambda: linen_layer(2, 16, dtype="bfloat17"),
        "TransformerLayer: dtype is 'bfloat17'",
    ),
    "dtype of parameters": (
        lambda: linen.LayerNorm(param_dtype=jnp.float8_e4m3fn).init(KEY, X),
        "LayerNorm: param_dtype is float8_e4m3fn",
    ),
    "dtype of an MLP's parameters": (
        lambda: of_nnx.LayerNormMLP(8, 16, param_dtype=None, rngs=RNGS),
        "LayerNormMLP: param_dtype is None",
    ),
    "a list for x": (
        lambda: of_nnx.Dense(8, 3, rngs=RNGS)([1.0] * 8),
        "Dense: x is a list; expected an array",
    ),
    "a list for x, linen": (
        lambda: linen.RMSNorm().init(KEY, [1.0] * 8),
        "RMSNorm: x is a list; expected an array",
    ),
    "a number for x": (
        lambda: linen.LayerNormMLP(16).init(KEY, jnp.ones(())),
        "LayerNormMLP: x is of shape (); expected [..., features]",
    ),
    "a list for kv": (
        lambda: of_nnx.MultiHeadAttention(2, 8, rngs=RNGS)(X, [[1.0]]),
        "MultiHeadAttention: kv is a list; expected an array",
    ),
    "a dict of rules": (
        lambda: of_nnx.Dense(8, 3, rules={"embed": "x"}, rngs=RNGS),
        "layers: rules is a mapping; expected pairs",
    ),
    "rules that are no pairs": (
        lambda: linen.Dense(3, kernel_axes=(None, None), rules=[("embed", 1)]).init(KEY, X),
        "layers: rules is made of ('embed', 1); expected pairs",
    ),
    "rngs": (
        lambda: of_nnx.Dense(8, 3, rngs=None),
        "layers: rngs is a NoneType; expected an nnx.Rngs",
    ),
    "axis that is no int": (
        lambda: linen.Dense(3, axis=1.0).init(KEY, X),
        "Dense: axis is 1.0; expected an int",
    ),
    "logical axes in a string": (
        lambda: of_nnx.Dense(8, 3, kernel_axes="ab", rngs=RNGS),
        "Dense: kernel_axes is 'ab'; expected a tuple of names",
    ),
    "bias of an RMSNorm": (
        lambda: of_nnx.RMSNorm(8, use_bias=True, rngs=RNGS),
        "RMSNorm: use_bias is True; expected False",
    ),
    "axis of a preset": (
        lambda: presets.tensor_parallel(3),
        "presets: the axis of 'heads' is 3; expected the name of a mesh axis",
    ),
    "one axis for two": (
        lambda: presets.fsdp_tensor_parallel("a", "a"),
        "presets: the axis of 'batch' is 'a', and that of 'heads' 'a'; expected different axes",
    ),
    "misspelt name": (
        lambda: presets.spec(presets.fsdp(), "embd"),
        "presets.spec: names is 'embd'; expected one of batch, embed",
    ),
    "stateful function": (
        lambda: drop_in.DotGeneral(so.recipes.DelayedScaling()),
        "DotGeneral: recipe is DelayedScaling(",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_was_wrong(name):
    call, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        call()
