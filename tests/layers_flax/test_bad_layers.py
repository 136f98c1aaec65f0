"""What does not fit a layer, its state, mesh or machine is named where it is made or traced."""

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
from shardops.layers import linen, presets
from shardops.layers import nnx as of_nnx
from shardops.layers.projections import Weights, projected
from tests import meshes

RNGS = nnx.Rngs(0)
X = jnp.ones((2, 4, 8))


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
    with pytest.raises(ValueError, match="Dense: delayed state quantizers is missing"):
        module.apply({"params": variables["params"]}, X)
    other = linen.Dense(16, recipe=so.recipes.DelayedScaling(amax_history_len=8))
    said = r"Dense: delayed state quantizers.input is .* of 4 steps; expected"
    with pytest.raises(ValueError, match=said):
        other.apply(variables, X)
    recipe = so.recipes.DelayedScaling(amax_history_len=4)
    for module, parts in (
        (linen.LayerNormDense(16, recipe=recipe), ["dense.quantizers"]),
        (linen.LayerNormMLP(16, recipe=recipe), ["up.quantizers"]),
        (linen.MultiHeadAttention(2, recipe=recipe), ["out.quantizers", "qkv_quantizers"]),
        (linen.TransformerLayer(2, 16, recipe=recipe), ["attention.out.quantizers"]),
    ):
        op = type(module).__name__
        of_it = module.init(jax.random.key(0), X)
        with pytest.raises(
            ValueError, match=rf"{op}: delayed state ({'|'.join(parts)}) is missing"
        ):
            module.apply({"params": of_it["params"]}, X)
    ours = of_nnx.Dense(8, 16, recipe=so.recipes.DelayedScaling(margin=1), rngs=RNGS)
    ours.recipe = so.recipes.DelayedScaling()
    with pytest.raises(ValueError, match=r"margin 1.*; expected .*margin 0"):
        ours(X)
    function = linen.DotGeneral(so.recipes.DelayedScaling())
    with pytest.raises(ValueError, match="DotGeneral: delayed state is missing"):
        function.apply({}, X, jnp.ones((8, 4)), (((2,), (0,)), ((), ())))


def test_cross_attention_whose_state_was_not_made_says_how_to_make_it():
    recipe = so.recipes.DelayedScaling(amax_history_len=4)
    module = of_nnx.MultiHeadAttention(2, 8, recipe=recipe, rngs=RNGS)
    with pytest.raises(ValueError, match=r"delayed state of kv is missing.*with in_kv_features"):
        module(X, X)


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


RULES = presets.tensor_sequence_parallel("tp", data="dp")
ON_MESH = {
    "rows": (
        lambda: linen.TransformerLayer(4, 32, rules=RULES).init(jax.random.key(0), ones(3, 8, 16)),
        "TransformerLayer: x is of shape (3, 8, 16); expected a multiple of the 2 devices along "
        "'dp' for its dim 'batch', which rules put there",
    ),
    "positions": (
        lambda: of_nnx.MultiHeadAttention(4, 16, rules=RULES, batch_first=False, rngs=nnx.Rngs(0))(
            ones(5, 4, 16)
        ),
        "MultiHeadAttention: x is of shape (5, 4, 16); expected a multiple of the 4 devices along "
        "'tp' for its dim 'sequence'",
    ),
    "rank": (
        lambda: of_nnx.LayerNormMLP(16, 32, rules=RULES, rngs=nnx.Rngs(0))(ones(8, 16)),
        "LayerNormMLP: x is of shape (8, 16); expected [batch, sequence, features]",
    ),
    "features": (
        lambda: of_nnx.LayerNormMLP(16, 30, rules=RULES, rngs=nnx.Rngs(0)),
        "Dense: kernel is of shape (16, 30); expected a multiple of the 4 devices along 'tp' for "
        "its dim 'mlp'",
    ),
    "features, linen": (
        lambda: linen.Dense(4, kernel_axes=("embed", None), rules=presets.fsdp("dp")).init(
            jax.random.key(0), ones(8, 15)
        ),
        "Dense: kernel is of shape (15, 4); expected a multiple of the 2 devices along 'dp'",
    ),
    "axis": (
        lambda: of_nnx.LayerNormMLP(16, 32, rules=presets.fsdp("model"), rngs=nnx.Rngs(0)),
        "Rename 'model', or map to None",
    ),
    "names": (
        lambda: of_nnx.Dense(8, 8, kernel_axes=("mlp", "mlp"), rules=RULES, rngs=nnx.Rngs(0)),
        "Dense: kernel is ('mlp', 'mlp'); expected each name once",
    ),
    "gathered": (
        lambda: of_nnx.TransformerLayer(
            16, 4, 32, rules=RULES, keep_gathered=True, rngs=nnx.Rngs(0)
        )(ones(4, 8, 16)),
        "TransformerLayer: x is at P(None, None, None); expected P('dp', 'tp', None), with "
        "keep_gathered=True",
    ),
}


def ones(*shape):
    return jnp.ones(shape)


@pytest.mark.parametrize("name", ON_MESH)
def test_what_rules_cannot_place_is_named(name):
    call, said = ON_MESH[name]
    with meshes.entered("explicit"), pytest.raises(ValueError, match=re.escape(said)):
        call()


def test_a_module_of_another_mesh_is_named():
    with meshes.entered("explicit"):
        module = of_nnx.LayerNormMLP(16, 32, rules=presets.tensor_parallel(), rngs=nnx.Rngs(0))
    with (
        meshes.entered("explicit", {"dp": 4, "tp": 2}),
        pytest.raises(ValueError, match=r"layers: an array is on .*'tp': 4.*one on .*'tp': 2"),
    ):
        module(ones(4, 8, 16))


def test_inputs_are_kept_on_explicit_axes_alone():
    module = linen.TransformerLayer(4, 32, rules=RULES, keep_gathered=True)
    with (
        meshes.entered("auto"),
        pytest.raises(ValueError, match="TransformerLayer: keep_gathered is True; expected False"),
    ):
        module.init(jax.random.key(0), ones(4, 8, 16))


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
