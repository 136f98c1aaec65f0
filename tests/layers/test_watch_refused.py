"""Where `watch` refuses: what JAX would add up, and what is no state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from tests import meshes
from tests.layers.test_watch import BATCHES, KERNEL, QS, ROLES, WANT, dense, loss, seen_of


@pytest.mark.parametrize("watched", ["inside", "outside"])
def test_a_shard_map_that_adds_up_cotangents_is_refused(watched):
    with meshes.entered("auto", {"dp": 2}) as mesh:

        def by_hand(qs, x):
            qs = so.recipes.watch(qs) if watched == "inside" else qs
            return jax.lax.psum(jnp.sum(dense(x, qs)), "dp")

        def f(qs, x):
            qs = qs if watched == "inside" else so.recipes.watch(qs)
            specs = {"in_specs": (P(), P("dp")), "out_specs": P()}
            return jax.shard_map(by_hand, mesh=mesh, check_vma=False, **specs)(qs, x)

        refusal = "check_vma=False" if watched == "inside" else "max32"
        with pytest.raises((NotImplementedError, TypeError), match=refusal):
            jax.jit(jax.grad(f))(QS, BATCHES[0])


def test_watch_says_what_it_wants():
    with pytest.raises(NotImplementedError, match=r"watch: .* outside of a jit"):
        so.recipes.watch(QS)
    with pytest.raises(ValueError, match=r"dense: quantizers.input is delayed state that nothing"):
        jax.jit(jax.grad(lambda x: jnp.sum(dense(x, QS))))(BATCHES[0])
    twice = lambda q: jnp.sum(dense(BATCHES[0], so.recipes.watch(so.recipes.watch(q))))  # noqa: E731
    with pytest.raises(ValueError, match=r"watch: quantizers is watched already"):
        jax.jit(jax.grad(twice))(QS)
    with pytest.raises(ValueError, match=r"update: observed is of structure"):
        so.recipes.update(QS, (QS, QS))
    other = so.recipes.DelayedScaling(amax_history_len=5).dense_quantizers()
    with pytest.raises(ValueError, match=r"update: observed is of histories of shape \(5,\)"):
        so.recipes.update(QS, other)
    for of_none in (so.recipes.watch, lambda tree: so.recipes.update(tree, tree)):
        with pytest.raises(
            TypeError, match=r"quantizers is a tree with a int; expected Quantizers"
        ):
            of_none({"a": 1})
    with pytest.raises(ValueError, match="watch: quantizers is delayed state without amax_history"):
        so.recipes.watch(dataclasses.replace(QS.input, amax_history=None))
    assert np.isfinite(dense(BATCHES[0], QS)).all()  # no gradient: state as it is kept


def watched_in_a_scan(qs, xs):
    def body(total, x):
        return total + loss(x, so.recipes.watch(qs)), None

    return jax.lax.scan(body, 0.0, xs)[0]


def watched_in_a_program_in_a_loop(qs, xs):
    inner = jax.jit(lambda x: jax.checkpoint(loss)(x, so.recipes.watch(qs)))
    return jax.lax.fori_loop(0, 4, lambda i, total: total + inner(xs[i]), 0.0)


def watched_for_each_batch(qs, xs):
    return sum(loss(x, so.recipes.watch(qs)) for x in xs)


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (watched_in_a_scan, "of outside of the scan in which it is watched"),
        (watched_in_a_program_in_a_loop, "of outside of the fori_loop in which it is watched"),
        (watched_for_each_batch, "watched a second time"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_whose_cotangents_jax_would_add_is_refused_in_a_gradient(f, said):
    """Without one the same function runs: a loss over the batches of an evaluation."""
    for gradient in (jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
        with pytest.raises(ValueError, match=f"watch: quantizers is {said}; expected state"):
            gradient(QS, BATCHES)
    assert np.isfinite(jax.jit(f)(QS, BATCHES))


def branches_that_watch(qs, xs):
    large, small = (lambda x=x: loss(x, so.recipes.watch(qs)) for x in (xs[1], xs[0]))
    return jax.lax.cond(xs[0, 0, 0] < 0, large, small)


def gradients_in_a_scan(qs, xs):
    """Each iteration's own: nothing is added."""

    def body(carry, x):
        return carry, jax.grad(lambda qs: loss(x, so.recipes.watch(qs)))(qs)

    return jax.tree.map(lambda a: a.max(0), jax.lax.scan(body, 0.0, xs)[1])


def test_state_that_is_watched_where_nothing_is_added_is_not_refused():
    assert seen_of(branches_that_watch, BATCHES) == WANT
    seen = jax.jit(gradients_in_a_scan)(QS, BATCHES)
    assert [float(getattr(seen, role).scale_inv) for role in ROLES] == WANT
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 2), QS)

    def layers(qs, x):  # each its own state, watched in the body
        body = lambda x, q: (dense(x, so.recipes.watch(q), 2 * KERNEL), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, qs)[0])

    of_x, *_ = seen_of(layers, BATCHES[1], qs=stacked)
    assert of_x.tolist() == [3, 3]
