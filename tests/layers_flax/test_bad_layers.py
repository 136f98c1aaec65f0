"""What a user gets wrong in a layer is named where the layer is made or traced."""

import re
import subprocess
import sys
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops.kernels.target import target_for, use_target
from shardops.layers import drop_in, linen, presets
from shardops.layers import nnx as of_nnx
from shardops.layers.attention import attention
from shardops.layers.projections import Weights, projected
from tests import meshes

RNGS = nnx.Rngs(0)
X = jnp.ones((2, 4, 8))
Q = jnp.ones((2, 4, 4, 8))


def linen_layer(*sizes, **options):
    return linen.TransformerLayer(*sizes, **options).init(jax.random.key(0), X)


REFUSED = {
    "heads": (
        lambda: of_nnx.TransformerLayer(8, 3, 16, rngs=RNGS),
        "TransformerLayer: num_heads is 3; expected a divisor of the 8 features",
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


def test_recipe_that_is_none():
    with pytest.raises(TypeError, match=r"Dense: recipe is a str; expected one of so\.recipes"):
        of_nnx.Dense(8, 3, recipe="fp8", rngs=RNGS)


def test_recipe_that_a_gpu_has_no_products_for_says_what_it_does_instead():
    def make(recipe, arch):
        gpu = mock.patch.object(jax, "default_backend", return_value="gpu")
        with gpu, use_target(target_for(arch, 132)):
            of_nnx.Dense(8, 3, recipe=recipe, rngs=RNGS)

    for recipe in (so.recipes.CurrentScaling(), so.recipes.Block128Scaling()):
        make(recipe, "sm_90")
    make(so.recipes.MXFP8Scaling(), "sm_100")
    with pytest.warns(UserWarning, match="sm_90 has no MXFP8 tensor cores, so in bfloat16"):
        make(so.recipes.MXFP8Scaling(), "sm_90")
    with pytest.warns(UserWarning, match="sm_80 has no FP8 tensor cores, so in"):
        make(so.recipes.DelayedScaling(), "sm_80")


def test_state_that_is_missing_or_of_another_recipe():
    module = linen.Dense(16, recipe=so.recipes.DelayedScaling(amax_history_len=4))
    variables = module.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="Dense: delayed state is missing"):
        module.apply({"params": variables["params"]}, X)
    other = linen.Dense(16, recipe=so.recipes.DelayedScaling(amax_history_len=8))
    with pytest.raises(ValueError, match=r"delayed state of the input is .* of 4 steps; expected"):
        other.apply(variables, X)
    ours = of_nnx.Dense(8, 16, recipe=so.recipes.DelayedScaling(margin=1), rngs=RNGS)
    ours.recipe = so.recipes.DelayedScaling()
    with pytest.raises(ValueError, match=r"margin 1.*; expected .*margin 0"):
        ours(X)
    function = linen.DotGeneral(so.recipes.DelayedScaling())
    with pytest.raises(ValueError, match="DotGeneral: delayed state is missing"):
        function.apply({}, X, jnp.ones((8, 4)), (((2,), (0,)), ((), ())))


def test_state_that_nobody_watches_is_refused_in_a_gradient():
    module = linen.Dense(16, recipe=so.recipes.DelayedScaling(amax_history_len=4))
    variables = module.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"so\.recipes\.watch"):
        jax.jit(jax.grad(lambda v: module.apply(v, X).sum()))(variables)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_heads_that_do_not_divide_over_devices(framework):
    def make(heads, kv, rules):
        if framework == "nnx":
            return of_nnx.MultiHeadAttention(
                heads, 8, num_kv_heads=kv, head_dim=8, rules=rules, rngs=nnx.Rngs(0)
            )
        module = linen.MultiHeadAttention(heads, num_kv_heads=kv, head_dim=8, rules=rules)
        return module.init(jax.random.key(0), X)

    rules = presets.tensor_parallel("tp", data="dp")
    with meshes.entered("auto"):
        with pytest.raises(
            ValueError, match="num_heads is 6; expected a multiple of the 4 devices"
        ):
            make(6, 3, rules)
        with pytest.raises(ValueError, match=r"num_kv_heads is 2.*replicate_kv=True"):
            make(8, 2, rules)


def test_key_heads_that_no_number_of_copies_spreads_over_devices():
    weights = [Weights(jnp.ones((8, heads, 4))) for heads in (12, 3, 3)]
    with (
        meshes.entered("auto"),
        pytest.raises(ValueError, match=r"heads is \(12, 3, 3\).*4 devices along \('tp',\)"),
    ):
        projected(X, weights, heads=P(None, None, "tp"))


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_parameters_that_are_shards_by_hand(name):
    """The sums over manual axes would be missing, without a word."""
    module = {
        "mlp": lambda: of_nnx.LayerNormMLP(8, 16, rngs=nnx.Rngs(0)),
        "attention": lambda: of_nnx.MultiHeadAttention(4, 8, rngs=nnx.Rngs(0)),
    }[name]()
    graph, params = nnx.split(module)
    rules = presets.tensor_parallel("tp")
    cut = jax.tree.map(
        lambda v: presets.spec(rules, *v.get_metadata("out_sharding")),
        params,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )

    def apply(params, x):
        return nnx.merge(graph, params)(x)

    with meshes.entered("auto"):
        mapped = jax.jit(jax.shard_map(apply, in_specs=(cut, P()), out_specs=P()))
        with pytest.raises(ValueError, match="by hand"):
            mapped(params, X)


def test_rules_that_name_no_axis_of_the_mesh():
    rules = presets.tensor_parallel("model")
    with meshes.entered("auto"), pytest.raises(ValueError, match="Rename 'model'"):
        linen.Dense(8, out_axes=("batch", None, "mlp"), rules=rules).init(jax.random.key(0), X)


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_without_flax_the_library_imports_and_the_layers_say_what_to_install(name):
    program = f"""
import sys
from unittest import mock
sys.modules["flax"] = None
import shardops
import shardops.layers.presets, shardops.layers.transformer, shardops.layers.attention
try:
    import shardops.layers.{name}
except ImportError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert f"shardops.layers.{name}: flax is not installed" in ran.stdout
    assert "shardops[flax]" in ran.stdout


def test_masks_of_softmax_and_of_attention_say_the_opposite():
    """As docstrings warn: True hides in `Softmax`, and is seen by `MultiHeadAttention`."""
    mask = jnp.array([True, False])
    hidden = linen.Softmax().apply({}, jnp.zeros((1, 2)), mask=mask)
    assert hidden.tolist() == [[0, 1]]
    x = jnp.ones((1, 2, 4)).at[0, 1].set(5.0)
    module = nn.MultiHeadDotProductAttention(1, use_bias=False)
    variables = module.init(jax.random.key(0), x)
    ours = linen.MultiHeadAttention(1, use_bias=False).apply(
        variables, x, mask=mask[None, None, None]
    )
    theirs = module.apply(variables, x, mask=mask[None, None, None])
    assert jnp.allclose(ours, theirs, atol=1e-5)
