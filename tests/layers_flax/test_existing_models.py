"""Models of Flax's own layers by shardops: by their hooks, one call, Qwix, and in MaxText."""

import functools
import importlib
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardops as so
from shardops.layers import linen, maxtext
from shardops.layers import nnx as of_nnx
from shardops.layers.drop_in import DotGeneral
from tests import cases, meshes
from tests.closeness import assert_close

B, S, D = 2, 5, 32


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, D, decode=False, rngs=rngs)
        self.last = nnx.RMSNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, 8, rngs=rngs)
        self.own = nnx.Linear(8, 8, dot_general=custom, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return self.own(self.head(self.last(x)))


class Linen(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return nn.Dense(8, dot_general=custom)(nn.Dense(self.width)(nn.RMSNorm()(x)))


def custom(*args, **kwargs):
    """A product of the user's own, which stays."""
    return 2 * jax.lax.dot_general(*args, **kwargs)


def ops_in(f, x):
    return set(re.findall(r"shardops\.\w+", jax.jit(f).lower(x).as_text(debug_info=True)))


EVERY = {"shardops.layer_norm", "shardops.rms_norm", "shardops.dot_general"}


def same(rng, plain, replaced, ops=EVERY):
    x = cases.random(rng, (B, S, D), "float32")
    assert_close(replaced(x), np.asarray(plain(x), np.float64), reduced=4 * S * D, roundings=8)
    assert ops_in(plain, x) == set()
    assert ops_in(replaced, x) == ops


def test_nnx_model_by_one_call(rng):
    model = Nnx(nnx.Rngs(0))
    replaced = of_nnx.with_shardops(model)
    same(rng, model, replaced)
    have, want = (jax.tree.structure(nnx.state(m)) for m in (replaced, model))
    assert have == want


def test_linen_model_by_one_call(rng):
    model = Linen()
    replaced = linen.with_shardops(model)
    x = cases.random(rng, (B, S, D), "float32")
    variables = model.init(jax.random.key(0), x)
    again = replaced.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables, again)
    assert replaced.width == 8
    same(
        rng, functools.partial(model.apply, variables), functools.partial(replaced.apply, variables)
    )


def test_a_linen_model_that_is_replaced_is_equal_pickles_and_may_be_replaced_again(rng):
    x = cases.random(rng, (B, S, D), "float32")
    replaced, again = (linen.with_shardops(Linen(width=4)) for _ in range(2))
    assert (type(replaced), replaced, hash(replaced)) == (type(again), again, hash(again))
    assert replaced != linen.with_shardops(Linen(width=4), so.recipes.CurrentScaling())
    assert pickle.loads(pickle.dumps(replaced)) == replaced
    variables = replaced.init(jax.random.key(0), x)
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(model, variables, x):
        traced.append(model)
        return model.apply(variables, x)

    for model in (replaced, again, pickle.loads(pickle.dumps(replaced))):
        apply(model, variables, x)
    assert len(traced) == 1
    recipe = so.recipes.CurrentScaling()
    twice = linen.with_shardops(replaced, recipe)
    assert twice == linen.with_shardops(Linen(width=4), recipe)


@pytest.mark.parametrize(
    ("model", "ops"),
    [
        (nn.LayerNorm(), {"shardops.layer_norm"}),
        (nn.RMSNorm(), {"shardops.rms_norm"}),
        (nn.Dense(8), {"shardops.dot_general"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_linen_layer_that_is_the_whole_model(rng, model, ops):
    variables = model.init(jax.random.key(0), jnp.ones((B, S, D)))
    replaced = linen.with_shardops(model)
    applied = (functools.partial(m.apply, variables) for m in (model, replaced))
    same(rng, *applied, ops)


def test_an_nnx_model_takes_the_recipe_of_the_last_call(rng):
    """A product of the user's own, by the same class, stays."""
    x = cases.random(rng, (B, S, D), "float32")
    model = nnx.Linear(D, 8, rngs=nnx.Rngs(0))
    twice = of_nnx.with_shardops(of_nnx.with_shardops(model), so.recipes.CurrentScaling())
    once = of_nnx.with_shardops(model, so.recipes.CurrentScaling())
    np.testing.assert_array_equal(twice(x), once(x))
    own = nnx.Linear(D, 8, dot_general=DotGeneral(so.recipes.MXFP8Scaling()), rngs=nnx.Rngs(0))
    assert of_nnx.with_shardops(own).dot_general == own.dot_general


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: of_nnx.with_shardops(3), TypeError, "model is a int; expected an NNX module"),
        (lambda: of_nnx.with_shardops(nn.Dense(3)), TypeError, "linen.with_shardops"),
        (
            lambda: linen.with_shardops(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
            TypeError,
            "model is a Linear; expected a Linen module. Models of NNX",
        ),
        (lambda: linen.with_shardops(nn.Dense), TypeError, "model is the class Dense"),
        (lambda: linen.with_shardops(Linen(), methods="enc"), TypeError, "methods is 'enc'"),
        (
            lambda: linen.with_shardops(Linen(), methods=("nope",)),
            ValueError,
            "methods is 'nope'; expected methods of Linen",
        ),
    ],
)
def test_what_is_no_model_is_refused(call, error, said):
    with pytest.raises(error, match=re.escape(said)):
        call()


def test_products_of_a_recipe_in_a_model_as_it_stands(rng):
    """8-bit operands: some 3 bits of mantissa a product, none of it where batch dims are."""
    x = cases.random(rng, (B, S, D), "float32")
    model = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0))
    got, want = of_nnx.with_shardops(model, so.recipes.CurrentScaling())(x), model(x)
    worst = float(jnp.abs(got - want).max() / jnp.abs(want).max())
    assert 1e-3 < worst < 4 * 2**-4


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_dot_general_of_flax_layers_on_a_mesh(rng, kind):
    """The hook as it is: NNX passes `out_sharding`, Linen makes a class once a call."""
    x = cases.random(rng, (B, S, D), "float32")
    layer = nnx.Linear(D, 8, rngs=nnx.Rngs(0))
    variables = {"params": {"kernel": layer.kernel[...], "bias": layer.bias[...]}}
    want = np.asarray(layer(x), np.float64)
    with meshes.entered(kind) as mesh:
        placed = meshes.place(mesh, x, "dp")
        layers = [
            nnx.Linear(D, 8, dot_general=so.dot_general, rngs=nnx.Rngs(0)),
            nnx.LinearGeneral(D, 8, dot_general_cls=lambda: so.dot_general, rngs=nnx.Rngs(0)),
            functools.partial(nn.Dense(8, dot_general=so.dot_general).apply, variables),
            functools.partial(nn.Dense(8, dot_general_cls=linen.DotGeneral).apply, variables),
        ]
        for one in layers:
            assert ops_in(one, placed) == {"shardops.dot_general"}
            assert_close(jax.jit(one)(placed), want, reduced=D, roundings=2)


def test_drop_ins_are_equal_by_their_recipe():
    """Flax keeps them among what it hashes."""
    one, other = (DotGeneral(so.recipes.CurrentScaling()) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != DotGeneral()
    one, other = (maxtext.Quantization(so.recipes.MXFP8Scaling()) for _ in range(2))
    assert (one, hash(one), one.get_block_size()) == (other, hash(other), 32)
    assert maxtext.Quantization().get_block_size() == 1


# ---- packages that may not be installed ----------------------------------------------------------


def installed(name):
    """The module, or a skip that says why."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed here: {error}")


@pytest.mark.filterwarnings("default::DeprecationWarning:qwix")
@pytest.mark.filterwarnings("default::DeprecationWarning:flax")
def test_qwix_provider(rng):
    qwix = installed("qwix")
    from shardops.layers.qwix_provider import ShardopsProvider

    model, x = Nnx(nnx.Rngs(0)), cases.random(rng, (B, S, D), "float32")
    all_of_it = ShardopsProvider([qwix.QuantizationRule(module_path="head|attention.*")])
    same(rng, model, qwix.quantize_model(model, all_of_it, x), {"shardops.dot_general"})
    none_of_it = ShardopsProvider([qwix.QuantizationRule(module_path="elsewhere")])
    assert ops_in(qwix.quantize_model(model, none_of_it, x), x) == set()

    model = Linen()
    variables = model.init(jax.random.key(0), x)
    provider = ShardopsProvider([qwix.QuantizationRule(module_path="Dense_0|Multi.*")])
    replaced = qwix.quantize_model(model, provider)
    applied = (functools.partial(m.apply, variables) for m in (model, replaced))
    same(rng, *applied, {"shardops.dot_general"})


@pytest.mark.filterwarnings("default")
def test_dense_layer_of_maxtext(rng):
    """MaxText's own layer, unchanged; it takes Python 3.12 and packages that few tests need."""
    linears = installed("maxtext.layers.linears")
    x = cases.random(rng, (B, S, D), "float32")

    def layer(quant):
        return linears.DenseGeneral(D, (4, 8), quant=quant, rngs=nnx.Rngs(0))

    same(rng, layer(None), layer(maxtext.Quantization()), {"shardops.dot_general"})
    recipe = so.recipes.DelayedScaling(amax_history_len=4)
    quantised = layer(maxtext.Quantization(recipe))
    quantised(x)
    graph, state = nnx.split(quantised)
    got = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    want = layer(None)(x)
    assert float(jnp.abs(got - want).max() / jnp.abs(want).max()) < 2**-3


class Holder(nn.Module):
    parent_given: bool

    @nn.compact
    def __call__(self, x):
        inner = nn.Dense(8, parent=None) if self.parent_given else nn.Dense(8)
        return linen.with_shardops(inner)(x)


def test_a_linen_module_that_another_one_holds_is_refused():
    x = jnp.ones((2, 16))
    variables = Holder(parent_given=True).init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables["params"]["Dense_0"]) == {
        "kernel": (16, 8),
        "bias": (8,),
    }
    with pytest.raises(ValueError, match="model is the submodule Dense_0 already; expected a mod"):
        Holder(parent_given=False).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="with_shardops: model is bound to variables; expected"):
        linen.with_shardops(Holder(parent_given=True).bind(variables))
