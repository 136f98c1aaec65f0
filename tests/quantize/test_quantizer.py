"""Recipes and the state of delayed scaling: rules, refusals, scans, optimizers, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import shardops as so
from tests import cases, meshes
from tests.primitives.refusals import refuses
from tests.quantize.quantisers import LAYOUTS, RECIPES, ROLES, bits


def delayed(**options):
    return so.recipes.DelayedScaling(**{"amax_history_len": 3, **options}).quantizer()


def test_update_takes_the_maximum_of_the_history():
    quantizer = delayed()
    assert (quantizer.scale_inv, quantizer.scale) == (1, 1)
    seen = []
    for amax in (3.0, 7.0, 2.0, 1.0, 1.0):
        quantizer = quantizer.update(jnp.float32(amax))
        seen.append(float(quantizer.scale_inv) * 448)
    np.testing.assert_allclose(seen, [3, 7, 7, 7, 2], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(quantizer.amax_history), [1, 1, 2])


def test_update_takes_the_most_recent():
    quantizer = delayed(amax_compute="most_recent")
    for amax in (7.0, 2.0):
        quantizer = quantizer.update(jnp.float32(amax))
    np.testing.assert_allclose(float(quantizer.scale_inv) * 448, 2, rtol=1e-6)


@pytest.mark.parametrize("margin", [-3, 0, 2])
def test_margin_is_a_power_of_two(margin):
    quantizer = delayed(margin=margin).update(jnp.float32(5))
    plain = delayed().update(jnp.float32(5))
    assert quantizer.scale_inv == plain.scale_inv * 2.0**margin
    assert delayed(margin=margin).scale_inv == 2.0**margin


@pytest.mark.parametrize("amax", [np.inf, np.nan])
def test_update_of_what_is_not_finite_leaves_all(amax):
    quantizer = delayed().update(jnp.float32(3))
    assert bits(quantizer.update(jnp.float32(amax))) == bits(quantizer)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-39])
def test_update_of_nothing_keeps_the_scale(amax):
    """And rolls: of a history of zeros alone no scale can be told."""
    quantizer = delayed().update(jnp.float32(3))
    scale = quantizer.scale_inv
    for _ in range(4):
        quantizer = quantizer.update(jnp.float32(amax))
    assert quantizer.scale_inv == scale


@pytest.mark.parametrize("margin", [-64, 64])
@pytest.mark.parametrize("amax", [1.2e-38, 1e-30, 3.4e38])
def test_scale_and_its_inverse_are_finite(amax, margin):
    quantizer = delayed(margin=margin).update(jnp.float32(amax))
    for one in (quantizer.scale_inv, quantizer.scale):
        assert np.isfinite(np.asarray(one))
        assert np.asarray(one) >= np.finfo(np.float32).tiny


def test_microbatches_count_once():
    """Magnitudes 1 and 3 in one step are 3, and one entry."""

    @jax.jit
    def step(quantizer, batches):
        def one(amax, x):
            return jnp.maximum(amax, so.quantize(x, quantizer).amax), None

        return quantizer.update(jax.lax.scan(one, jnp.float32(0), batches)[0])

    batches = jnp.asarray([[[1.0, -0.5]], [[3.0, 2.0]]])
    got = step(delayed(), batches)
    np.testing.assert_array_equal(np.asarray(got.amax_history), [3, 0, 0])


def _steps(quantizer, xs):
    def one(quantizer, x):
        scaled = so.quantize(x, quantizer)
        return quantizer.update(scaled.amax), scaled.dequantize()

    return jax.lax.scan(one, quantizer, xs)


def test_scan_over_steps(rng):
    """As a loop, and the same on every mesh."""
    xs = cases.random(rng, (5, 8, 64)) * np.float32([1, 9, 3, 0.5, 2])[:, None, None]
    quantizer, want = delayed(), []
    for x in xs:
        scaled = so.quantize(jnp.asarray(x), quantizer)
        want.append(scaled.dequantize())
        quantizer = quantizer.update(scaled.amax)
    done = jax.jit(_steps)(delayed(), xs)
    assert bits(done) == bits((quantizer, jnp.stack(want)))
    for kind in ("auto", "explicit"):
        with meshes.entered(kind) as mesh:
            placed = meshes.place(mesh, xs, None, "dp", "tp")
            assert bits(jax.jit(_steps)(delayed(), placed)) == bits(done)


def test_other_modes_have_no_state():
    for name in ("current", "block", "mxfp8"):
        quantizer = RECIPES[name].quantizer()
        assert jax.tree.leaves(quantizer) == []
        assert quantizer.update(None) is quantizer.update(jnp.float32(1)) is quantizer
        assert quantizer.scale is None


def test_quantizers_that_are_equal_trace_once():
    traces = []

    @jax.jit
    def f(x, quantizer):
        traces.append(quantizer.mode)
        return so.quantize(x, quantizer)

    for _ in range(2):
        for name in RECIPES:
            f(jnp.ones((4, 64)), RECIPES[name].quantizer())
    assert len(traces) == len(RECIPES)


# --- optimizers and checkpoints -----------------------------------------------------------------


def test_quantizer_in_a_train_state_under_optax(rng):
    """State beside the parameters; the weight is quantised in the loss, its master copy learns."""
    optimizer = optax.adam(1e-2)
    w = jnp.asarray(cases.random(rng, (64, 32)))
    x = jnp.asarray(cases.random(rng, (16, 64)))
    y = x @ jnp.asarray(cases.random(rng, (64, 32)))

    @jax.jit
    def step(w, state, quantizer):
        def loss(w):
            scaled = so.quantize(w, quantizer)
            return jnp.mean((so.gemm(x, scaled.dequantize()) - y) ** 2), scaled.amax

        (value, amax), dw = jax.value_and_grad(loss, has_aux=True)(w)
        updates, state = optimizer.update(dw, state, w)
        return optax.apply_updates(w, updates), state, quantizer.update(amax), value

    state, quantizer, values = optimizer.init(w), delayed(), []
    for _ in range(30):
        w, state, quantizer, value = step(w, state, quantizer)
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]
    assert float(quantizer.scale_inv) == float(
        jnp.max(quantizer.amax_history) * (np.float32(1) / np.float32(448))
    )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_scaled_arrays_and_quantizers_through_orbax(rng, tmp_path, kind):
    with meshes.entered(kind) as mesh:
        x = meshes.place(mesh, cases.random(rng, (256, 512)), "dp", "tp")
        state = {}
        for name, recipe in RECIPES.items():
            quantizer = recipe.quantizer("input", "both")
            scaled = jax.jit(so.quantize)(x, quantizer)
            state[name] = {"q": quantizer.update(scaled.amax), "x": scaled.detach()}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            shapes = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
            )
            got = checkpointer.restore(tmp_path / "state", shapes)
        assert jax.tree.structure(got) == jax.tree.structure(state)
        assert bits(got) == bits(state)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
            assert one.sharding == other.sharding


def test_device_put_of_what_a_quantiser_made(rng):
    """Each array by its own sharding, and dequantised where it lies."""
    scaled = so.quantize(jnp.asarray(cases.random(rng, (256, 512))), RECIPES["block"].quantizer())
    with meshes.entered("auto") as mesh:
        whole = jax.tree.map(lambda a: meshes.place(mesh, a, "dp", "tp"), scaled)
        assert bits(jax.jit(lambda s: s.dequantize())(whole)) == bits(scaled.dequantize())


# --- what is refused ----------------------------------------------------------------------------


def _of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("op", ["quantize", "rms_norm", "layer_norm"])
def test_refuses_what_is_no_quantizer(op):
    for wrong in ("float8_e4m3fn", so.recipes.CurrentScaling(), jnp.float8_e4m3fn):

        def call(x, wrong=wrong):
            if op == "quantize":
                return so.quantize(x, wrong)
            return getattr(so, op)(x, jnp.ones(64), quantizer=wrong)

        refuses(TypeError, call, _of(4, 64), op=op, argument="quantizer", says=("Quantizer",))


def test_quantize_refuses_dtypes_and_shapes():
    block, current = RECIPES["block"], RECIPES["current"]
    calls = [
        (TypeError, _of(4, 64, dtype=jnp.int32), current.quantizer(), "int32"),
        (ValueError, _of(64), current.quantizer(layout="columns"), "columns"),
        (ValueError, _of(64), block.quantizer("kernel"), "(128, 128)"),
        (ValueError, _of(), RECIPES["mxfp8"].quantizer(), "(1, 32)"),
    ]
    for error, shape, quantizer, says in calls:
        refuses(
            error,
            lambda x, q=quantizer: so.quantize(x, q),
            shape,
            op="quantize",
            argument="x",
            says=(says,),
        )
    refuses(
        ValueError,
        lambda x: so.rms_norm(x, jnp.ones(64), quantizer=current.quantizer(layout="both")),
        _of(64),
        op="rms_norm",
        argument="x",
        says=("both",),
    )


def test_quantizers_are_equal_by_statics_and_state():
    for recipe in RECIPES.values():
        assert recipe.quantizer() == recipe.quantizer() != recipe.quantizer(layout="both")
        assert hash(recipe.quantizer()) == hash(recipe.quantizer())
    delayed = RECIPES["delayed"].quantizer()
    assert delayed != delayed.update(1.0) == delayed.update(jnp.float32(1))


@pytest.mark.parametrize("amax", ["a", True, 1j, [1.0]], ids=str)
def test_update_refuses_what_is_no_number(amax):
    with pytest.raises(TypeError, match=r"update: amax is a .*; expected a number"):
        RECIPES["delayed"].quantizer().update(amax)


def test_update_refuses_none_and_shapes():
    refuses(TypeError, lambda: delayed().update(None), op="update", argument="amax")
    refuses(
        ValueError, lambda a: delayed().update(a), _of(3), op="update", argument="amax", says=("3",)
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_refuse_other_settings(name):
    recipe = RECIPES[name]
    op = type(recipe).__name__
    for argument in ("role", "layout"):
        refuses(
            ValueError,
            lambda a=argument: recipe.quantizer(**{a: "weight"}),
            op=op,
            argument=argument,
            says=("'weight'",),
        )
    refuses(
        ValueError,
        lambda: type(recipe)(formats="E5M2"),
        op=op,
        argument="formats",
        says=("'E5M2'", "'E4M3' | 'HYBRID'"),
    )
    for role in ROLES:
        for layout in LAYOUTS:
            assert recipe.quantizer(role, layout).layout == layout


@pytest.mark.parametrize(
    "error, options",
    [
        (ValueError, {"amax_history_len": 0}),
        (TypeError, {"amax_history_len": 2.0}),
        (ValueError, {"margin": 65}),
        (TypeError, {"margin": True}),
        (ValueError, {"amax_compute": "mean"}),
    ],
)
def test_delayed_scaling_refuses(error, options):
    argument = next(iter(options))
    make = lambda: so.recipes.DelayedScaling(**options)  # noqa: E731
    refuses(error, make, op="DelayedScaling", argument=argument)
