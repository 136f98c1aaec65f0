"""Largest magnitudes of several uses of one state: combined by maximum, rolled once (case 19)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes

RECIPE = so.recipes.DelayedScaling(amax_history_len=3)
QS = RECIPE.dense_quantizers()
KERNEL = np.eye(16, dtype=np.float32) / 2
BATCHES = np.zeros((4, 8, 16), np.float32)
for i, amax in enumerate((1.0, 3.0, 2.5, 0.7)):
    BATCHES[i, i, i], BATCHES[i, 2, 5] = -amax, amax / 2


def dense(x, qs, kernel=KERNEL):
    return so.dense(x, jnp.asarray(kernel), quantizers=qs)


def loss(x, qs):
    """The cotangent of the product is x's own largest magnitude, everywhere: 1, 3, …"""
    return jnp.sum(dense(x, qs)) * jnp.max(jnp.abs(x))


def seen_of(f, *args, qs=QS):
    """What one compiled gradient sees: of inputs, kernels, gradients."""
    seen = jax.jit(jax.grad(f))(qs, *args)
    assert jax.tree.structure(seen) == jax.tree.structure(qs)
    for role in ROLES:  # no history, by which `update` knows a state from magnitudes
        assert (np.asarray(getattr(seen, role).amax_history) <= 0).all()
    return [np.asarray(getattr(seen, role).scale_inv) for role in ROLES]


ROLES = ("input", "kernel", "gradient")
WANT = [3.0, 0.5, 3.0]


def several_uses(qs, xs):
    qs = so.recipes.watch(qs)
    return sum(loss(x, qs) for x in xs)


def scanned(qs, xs, body=loss):
    qs = so.recipes.watch(qs)
    return jax.lax.scan(lambda total, x: (total + body(x, qs), None), 0.0, xs)[0]


def checkpointed_scan(qs, xs):
    return scanned(qs, xs, jax.checkpoint(loss))


def checkpointed(qs, xs):
    return jax.checkpoint(several_uses)(qs, xs)


def unrolled_loop(qs, xs):
    qs = so.recipes.watch(qs)
    return jax.lax.fori_loop(0, 4, lambda i, t: t + loss(xs[i], qs), 0.0)


def vmapped(qs, xs):
    qs = so.recipes.watch(qs)
    return jnp.sum(jax.vmap(lambda x: loss(x, qs))(xs))


def vmapped_scan(qs, xs):
    qs = so.recipes.watch(qs)
    rows = xs.reshape(2, 2, 8, 16)

    def one(xs):
        return jax.lax.scan(lambda total, x: (total + loss(x, qs), None), 0.0, xs)[0]

    return jnp.sum(jax.vmap(one)(rows))


def branched(qs, xs):
    qs = so.recipes.watch(qs)
    big = jax.lax.cond(xs[0, 0, 0] < 0, lambda: loss(xs[1], qs), lambda: loss(100 * xs[1], qs))
    return big + loss(xs[0], qs)


def jitted_within(qs, xs):
    qs = so.recipes.watch(qs)
    inner = jax.jit(loss)
    return sum(inner(x, qs) for x in xs)


TRANSFORMS = (
    several_uses,
    scanned,
    checkpointed_scan,
    checkpointed,
    unrolled_loop,
    vmapped,
    vmapped_scan,
    branched,
    jitted_within,
)


@pytest.mark.parametrize("f", TRANSFORMS, ids=lambda f: f.__name__)
def test_amaxes_of_several_uses_are_combined_by_maximum(f):
    assert seen_of(f, BATCHES) == WANT


@pytest.mark.parametrize("f", [scanned, checkpointed_scan, several_uses], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_amaxes_on_a_mesh_are_those_of_all_devices_on_each_of_them(f, kind):
    with meshes.entered(kind) as mesh:
        xs = meshes.place(mesh, BATCHES, None, "dp", "tp")
        seen = jax.jit(jax.grad(f))(QS, xs)
        for role, want in zip(ROLES, WANT, strict=True):
            amax = getattr(seen, role).scale_inv
            assert amax.is_fully_replicated
            assert [float(s.data) for s in amax.addressable_shards] == [want] * len(amax.devices())


@pytest.mark.parametrize("watched", ["inside", "outside"])
@pytest.mark.parametrize("axes", [("dp", "tp"), ("dp",)])
def test_amaxes_in_a_shard_map_are_those_of_all_devices(axes, watched):
    with meshes.entered("auto") as mesh:

        def by_hand(qs, xs):
            if watched == "inside":
                qs = so.recipes.watch(qs)

            def add(total, x):
                return total + jnp.sum(dense(x, qs) * jnp.max(jnp.abs(x))), None

            zero = jax.lax.pcast(jnp.zeros(()), axes, to="varying")
            return jax.lax.psum(jax.lax.scan(add, zero, xs)[0], axes)

        def f(qs, xs):
            if watched == "outside":
                qs = so.recipes.watch(qs)
            return jax.shard_map(
                by_hand,
                mesh=mesh,
                in_specs=(P(), P(None, axes)),
                out_specs=P(),
                axis_names={*axes},
            )(qs, xs)

        assert seen_of(f, BATCHES) == WANT


def test_state_of_each_layer_in_a_scan_over_layers_in_a_scan_over_microbatches():
    qs = jax.tree.map(lambda a: jnp.stack([a] * 2), QS)
    kernels = np.stack([2 * KERNEL, 4 * KERNEL])

    def f(qs, xs):
        qs = so.recipes.watch(qs)

        def layer(x, of_layer):
            kernel, qs = of_layer
            return dense(x, qs, kernel), None

        def microbatch(total, x):
            return total + jnp.sum(jax.lax.scan(layer, x, (kernels, qs))[0]), None

        return jax.lax.scan(microbatch, 0.0, xs)[0]

    of_x, of_kernel, of_dz = seen_of(f, BATCHES, qs=qs)
    assert of_x.tolist() == [3, 3]
    assert of_kernel.tolist() == [1, 2]
    assert of_dz.tolist() == [2, 1]
    step = jax.jit(lambda qs, xs: so.recipes.update(qs, jax.grad(f)(qs, xs)))
    assert step(qs, BATCHES).gradient.amax_history.tolist() == [[2, 0, 0], [1, 0, 0]]


def test_update_rolls_once_a_step_and_overwriting_gives_the_same_state():
    def overwriting(qs, xs):
        qs = so.recipes.watch(qs, overwrite=True)
        return sum(loss(x, qs) for x in xs)

    def step(qs, xs):
        return so.recipes.update(qs, jax.grad(several_uses)(qs, xs))

    step, overwrite = jax.jit(step), jax.jit(jax.grad(overwriting))
    one = other = QS
    for xs in (BATCHES, 2 * BATCHES[:2], BATCHES[3:]):
        one, other = step(one, xs), overwrite(other, xs)
    assert one.input.amax_history.tolist() == pytest.approx([0.7, 6, 3])
    assert one.gradient.amax_history.tolist() == pytest.approx([0.7, 6, 3])
    assert float(one.input.scale_inv) == pytest.approx(6 / 448)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_update_of_state_that_is_the_next_one_already_gives_it():
    """The cotangents of `watch(overwrite=True)`, which look like magnitudes."""

    def overwriting(qs, xs):
        qs = so.recipes.watch(qs, overwrite=True)
        return sum(loss(x, qs) for x in xs)

    next_one = jax.jit(jax.grad(overwriting))(QS, BATCHES)
    assert so.recipes.update(QS, next_one) == next_one


@pytest.mark.parametrize("factor", [0.0, np.inf])
def test_update_knows_a_state_whose_history_is_empty_still(factor):
    """A last kernel of zeros, as models begin with: the first gradient is 0."""

    def overwriting(qs, xs):
        return loss(xs[0], so.recipes.watch(qs, overwrite=True)) * factor

    def magnitudes(qs, xs):
        return loss(xs[0], so.recipes.watch(qs)) * factor

    next_one, seen = (jax.jit(jax.grad(f))(QS, BATCHES) for f in (overwriting, magnitudes))
    assert not next_one.gradient.amax_history.any()
    assert so.recipes.update(QS, next_one) == next_one == so.recipes.update(QS, seen)


def test_update_of_state_that_no_layer_used_sees_nothing():
    seen = jax.jit(jax.grad(lambda qs, x: (so.recipes.watch(qs), jnp.sum(x))[1]))(QS, BATCHES)
    assert so.recipes.update(QS, seen) == QS


def test_gradients_accumulated_by_hand_are_combined_by_jnp_maximum():
    gradient = jax.jit(jax.grad(lambda qs, x: loss(x, so.recipes.watch(qs))))
    one, *others = (gradient(QS, x) for x in BATCHES)
    for other in others:
        one = jax.tree.map(jnp.maximum, one, other)
    assert [float(getattr(one, role).scale_inv) for role in ROLES] == WANT


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_amax_that_is_not_finite_is_reported_and_leaves_the_state(value):
    xs = BATCHES.copy()
    xs[2, 1, 1] = value
    of_x, of_kernel, _ = seen_of(scanned, xs)
    np.testing.assert_array_equal(of_x, np.float32(value))
    assert of_kernel == 0.5
    state = jax.jit(lambda qs: so.recipes.update(qs, jax.grad(scanned)(qs, xs)))(QS)
    assert state.input.amax_history.tolist() == [0, 0, 0]
    assert state.kernel.amax_history.tolist() == [0.5, 0, 0]


def test_state_that_no_layer_uses_has_seen_nothing():
    assert seen_of(
        lambda qs, x: jnp.sum(x) + 0 * so.recipes.watch(qs).input.scale_inv, BATCHES
    ) == [
        0.0,
        0.0,
        0.0,
    ]


def test_other_recipes_pass_unwatched():
    for recipe in (so.recipes.CurrentScaling(), so.recipes.MXFP8Scaling()):
        qs = recipe.dense_quantizers()
        assert so.recipes.watch(qs) == qs
        assert so.recipes.update(qs, qs) == qs


def test_the_gradient_of_a_jitted_function_is_that_of_the_function():
    """Residuals leave one program and enter another."""

    def f(qs, x):
        return jnp.sum(dense(x, so.recipes.watch(qs)) ** 2)

    inside = jax.jit(jax.grad(f, argnums=(0, 1)))(QS, BATCHES[0])
    outside = jax.grad(jax.jit(f), argnums=(0, 1))(QS, BATCHES[0])
    for one, other in zip(*map(jax.tree.leaves, (inside, outside)), strict=True):
        np.testing.assert_array_equal(one, other)
