"""Reported cases at the level of modules.

29: scan and nested jit (shard_map: test_sharded_layers.py); 30: policies of checkpoint; 40: meshes
and logical axes. 19: test_delayed_state.py.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from shardops.layers import linen, presets
from shardops.layers import nnx as of_nnx
from tests import cases, meshes
from tests.closeness import assert_close
from tests.fuzz.amount import EXHAUSTIVE

RULES = presets.tensor_sequence_parallel("tp", data="dp")
D = 32


def small(rng, *lead):
    return cases.random(rng, (*lead, D), "float32")


def linen_layer(**options):
    return linen.TransformerLayer(4, 64, activation=("silu", "linear"), **options)


# ---- 29: scan, nested jit ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "explicit"] if EXHAUSTIVE else ["explicit"])
def test_layers_of_linen_in_a_scan(rng, kind):
    """Parameters stacked by `nn.scan`, whose axis the metadata takes in; one body's collectives."""
    x = cases.random(rng, (2, D, D), "float32")  # no more tokens a group than features

    class Model(nn.Module):
        rules: object = None

        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: None},
            )
            return scanned(linen_layer(rules=self.rules, name="layers"), x, None)[0]

    variables = nn.unbox(Model().init(jax.random.key(0), x))
    want = Model().apply(variables, x)
    assert variables["params"]["layers"]["attention"]["query"]["kernel"].shape == (3, D, 4, 8)
    boxed = jax.eval_shape(Model(RULES).init, jax.random.key(0), x)["params"]["layers"]
    assert boxed["attention"]["query"]["kernel"].names == (None, "embed", "heads", "head_dim")
    with meshes.entered(kind) as mesh:
        specs = jax.tree.map(
            lambda box: NamedSharding(mesh, presets.spec(RULES, *box.names)),
            boxed,
            is_leaf=lambda box: isinstance(box, nn.LogicallyPartitioned),
        )
        placed = {"params": {"layers": jax.device_put(variables["params"]["layers"], specs)}}
        at = meshes.place(mesh, x, "dp", "tp")
        apply = jax.jit(Model(RULES).apply)
        assert_close(apply(placed, at), np.asarray(want, np.float64), reduced=64 * D, roundings=16)
        found = {k: n for k, (n, _) in hlo.summary(apply.lower(placed, at).compile()).items()}
    assert found == {"all-gather": 2, "reduce-scatter": 2}


def test_layers_of_nnx_in_a_scan_and_a_nested_jit(rng):
    x = small(rng, 4, 16)

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return of_nnx.TransformerLayer(D, 4, 64, rngs=nnx.Rngs(params=key))

    layers = make(jax.random.split(jax.random.key(0), 3))

    @nnx.jit
    def model(layers, x):
        return nnx.scan(
            lambda layer, x: nnx.jit(lambda m, x: m(x))(layer, x),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
        )(layers, x)

    want = x
    graph, state = nnx.split(layers)
    for i in range(3):
        want = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state))(want)
    assert_close(model(layers, x), np.asarray(want, np.float64), reduced=64 * D, roundings=8)


# ---- 30: checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, set()),
        ("save_gemms", {"[2,8,4,3,8]", "[2,8,32]", "[2,8,2,64]"}),
        ("save_norms", {"[2,8,32]"}),
    ],
    ids=["none", "products", "norms"],
)
def test_policies_keep_products_and_norms_of_layers(rng, capsys, policy, kept):
    """Queries, keys and values; what attention and the MLP give; gate and linear half."""
    x = small(rng, 2, 8)
    module = linen_layer()
    variables = nn.unbox(module.init(jax.random.key(0), x))
    policy = policy and getattr(so.checkpoint_policies, policy)
    layer = jax.checkpoint(lambda v, x: jnp.sin(module.apply(v, x)), policy=policy)
    print_saved_residuals(layer, variables, x)
    lines = capsys.readouterr().out.splitlines()
    saved = {line.split(" ")[0] for line in lines if "from the argument" not in line}
    assert {shape.removeprefix("f32") for shape in saved} == kept


# ---- 40: no mesh, logical axes ------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_logical_axes_without_a_mesh_or_without_rules(rng, framework):
    """Names stay metadata; nothing asks for a mesh. A mesh without rules shards nothing."""
    x = small(rng, 2, 8)

    def kernel_and_value(rules):
        if framework == "nnx":
            module = of_nnx.LayerNormMLP(D, 64, rngs=nnx.Rngs(0), rules=rules)
            assert module.up.kernel.get_metadata("out_sharding") == ("embed", "mlp")
            return module.up.kernel[...], module(x)
        module = linen.LayerNormMLP(64, rules=rules)
        variables = module.init(jax.random.key(0), x)
        assert variables["params"]["up"]["kernel"].names == ("embed", "mlp")
        variables = nn.unbox(variables)
        return variables["params"]["up"]["kernel"], module.apply(variables, x)

    _, want = kernel_and_value(RULES)
    for kind in ("auto", "explicit"):
        with meshes.entered(kind):
            kernel, value = kernel_and_value(None)
            assert kernel.sharding.is_fully_replicated
            assert_close(value, np.asarray(want, np.float64), reduced=64, roundings=4)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_rules_of_flax_s_context(rng, kind):
    """Read where a module is made, and by NNX kept; a gradient is taken outside of them."""
    x = cases.random(rng, (4, 16, D), "float32")
    want = of_nnx.TransformerLayer(D, 4, 64, rngs=nnx.Rngs(0))(x)
    with meshes.entered(kind) as mesh:
        with nnx.logical_axis_rules(RULES):
            module = of_nnx.TransformerLayer(D, 4, 64, rngs=nnx.Rngs(0))
        kernel = module.attention.query.kernel[...]
        assert meshes.same(kernel.sharding.spec, P(None, "tp"))
        at = meshes.place(mesh, x, "dp", "tp")
        got = nnx.jit(lambda m, x: m(x))(module, at)
        assert meshes.same(got.sharding.spec, P("dp", "tp"))
        gradient = nnx.jit(nnx.grad(lambda m, x: (m(x) ** 2).mean()))(module, at)
        assert meshes.same(gradient.attention.query.kernel[...].sharding.spec, P(None, "tp"))
    assert_close(got, np.asarray(want, np.float64), reduced=64 * D, roundings=8)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_kernel_of_three_dims_with_logical_axes(rng, kind):
    """DenseGeneral into heads, whose result goes where `out_axes` says."""
    x = cases.random(rng, (4, 16, D), "float32")
    axes = {"kernel_axes": ("embed", "heads", None), "out_axes": ("batch", None, "heads", None)}
    dense = linen.Dense((4, 8), **axes)
    with meshes.entered(kind) as mesh, nn.logical_axis_rules(RULES):
        variables = jax.jit(dense.init)(jax.random.key(0), x)
        assert variables["params"]["bias"].names == ("heads", None)
        at = meshes.place(mesh, x, "dp", "tp")
        got = jax.jit(dense.apply)(nn.unbox(variables), at)
        assert meshes.same(got.sharding.spec, P("dp", None, "tp"))
    plain = nn.DenseGeneral((4, 8)).apply(nn.unbox(variables), x)
    assert_close(got, np.asarray(plain, np.float64), reduced=D, roundings=2)


@pytest.mark.parametrize("rules", [None, RULES], ids=["free", "ruled"])
@pytest.mark.parametrize("kind", ["explicit-auto", "auto-explicit"])
def test_modules_made_on_axes_of_both_kinds(rng, kind, rules):
    """Flax itself places no parameters there."""
    x = cases.random(rng, (2, 8, D), "float32")
    want = np.asarray(of_nnx.LayerNormMLP(D, 64, rngs=nnx.Rngs(0))(x), np.float64)
    with meshes.entered(kind) as mesh:
        at = meshes.place(mesh, x, "dp", "tp")
        module = of_nnx.LayerNormMLP(D, 64, rules=rules, rngs=nnx.Rngs(0))
        assert_close(nnx.jit(lambda m, x: m(x))(module, at), want, reduced=64, roundings=4)
        plain = linen.LayerNormMLP(64, rules=rules)
        variables = jax.jit(plain.init)(jax.random.key(0), at)
        kernels = (module.up.kernel[...], nn.unbox(variables)["params"]["up"]["kernel"])
        value = jax.jit(plain.apply)(variables, at)
        assert np.isfinite(np.asarray(value)).all()
        for kernel in kernels:
            if rules is not None:
                assert meshes.same(kernel.sharding.spec, P(None, "tp"))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_rules_that_put_two_dims_on_one_axis(kind):
    """The one whose rule is first has it, in both frameworks: each axis cuts one dim."""
    rules = (("embed", "tp"), ("heads", "tp"), ("kv_heads", "tp"), ("mlp", "tp"))
    with meshes.entered(kind):
        module = of_nnx.LayerNormMLP(D, 64, rules=rules, rngs=nnx.Rngs(0))
        assert meshes.same(module.up.kernel[...].sharding.spec, P("tp"))
        made = jax.jit(linen.LayerNormMLP(64, rules=rules).init)(
            jax.random.key(0), jnp.ones((2, D))
        )
        assert meshes.same(nn.unbox(made)["params"]["up"]["kernel"].sharding.spec, P("tp"))


def test_modules_of_both_frameworks_say_the_same_of_their_parameters():
    x = jnp.ones((1, 4, D))
    for make in (
        lambda f, **o: f.LayerNormMLP(D, 64, **o) if f is of_nnx else f.LayerNormMLP(64, **o),
        lambda f, **o: (
            f.MultiHeadAttention(4, D, **o) if f is of_nnx else f.MultiHeadAttention(4, **o)
        ),
    ):
        boxed = make(linen).init(jax.random.key(0), x)["params"]
        state = nnx.state(make(of_nnx, rngs=nnx.Rngs(0)), nnx.Param)
        theirs = {
            jax.tree_util.keystr(path, simple=True, separator="."): box.names
            for path, box in jax.tree.leaves_with_path(
                boxed, is_leaf=lambda b: isinstance(b, nn.LogicallyPartitioned)
            )
        }
        ours = {
            ".".join(path): v.get_metadata("out_sharding") for path, v in nnx.to_flat_state(state)
        }
        assert ours == theirs
