"""The transformations of the matrix. Each makes a function of the op's operands of the op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

Function = Callable[..., Any]


@dataclass(frozen=True)
class Transformation:
    """`apply(f, nested)`: of the op, and of the op with a shard_map more, a function of operands.

    traced: the function may be traced, so that those of several ops make one program; else it calls
      programs of its own.
    mesh: it needs one.
    """

    name: str
    apply: Callable[[Function, Function], Function]
    traced: bool = True
    mesh: bool = False


TRANSFORMATIONS: list[Transformation] = []


def of(name: str, **options: bool) -> Callable:
    def add(apply: Callable[[Function, Function], Function]) -> Callable:
        TRANSFORMATIONS.append(Transformation(name, apply, **options))
        return apply

    return add


def loss(f: Function) -> Function:
    return lambda *a: jnp.sum(jnp.sin(f(*a)))


def every(arrays: tuple) -> tuple[int, ...]:
    return tuple(range(len(arrays)))


def gradients(f: Function) -> Function:
    return lambda *a: jax.grad(loss(f), every(a))(*a)


@of("eager", traced=False)
def _(f: Function, nested: Function) -> Function:
    return lambda *a: (f(*a), gradients(f)(*a))


@of("jit")
def _(f: Function, nested: Function) -> Function:
    return jax.jit(f)


@of("nested jit")
def _(f: Function, nested: Function) -> Function:
    return jax.jit(lambda *a: jax.jit(gradients(jax.jit(f)))(*a))


@of("grad")
def _(f: Function, nested: Function) -> Function:
    return gradients(f)


@of("value_and_grad")
def _(f: Function, nested: Function) -> Function:
    return lambda *a: jax.value_and_grad(loss(f), every(a))(*a)


@of("vjp")
def _(f: Function, nested: Function) -> Function:
    def pulled(*a: Any) -> Any:
        out, pull = jax.vjp(f, *a)
        return out, pull(jnp.cos(out))

    return pulled


@of("grad of grad")
def _(f: Function, nested: Function) -> Function:
    def penalty(*a: Any) -> Any:
        return sum(jnp.sum(jnp.square(g)) for g in gradients(f)(*a))

    return lambda *a: jax.grad(penalty, every(a))(*a)


@of("jvp")
def _(f: Function, nested: Function) -> Function:
    return lambda *a: jax.jvp(f, a, a)


@of("jacrev")
def _(f: Function, nested: Function) -> Function:
    return lambda *a: jax.jacrev(lambda *a: jnp.sum(f(*a), (0, 1)), every(a))(*a)


def mapped_over(f: Function, *sets: tuple[int, ...]) -> Function:
    """f mapped over the operands of each set by turns."""

    def mapped(*a: Any) -> Any:
        out = []
        for chosen in sets:
            axes = tuple(0 if i in chosen else None for i in every(a))
            some = [jnp.stack([b, 2 * b, -b]) if i in chosen else b for i, b in enumerate(a)]
            out.append(jax.vmap(f, axes)(*some))
        return out

    return mapped


def by_itself(a: tuple) -> list[tuple[int, ...]]:
    return [(i,) for i in every(a)]


@of("vmap")
def _(f: Function, nested: Function) -> Function:
    return lambda *a: mapped_over(f, *by_itself(a), every(a))(*a)


@of("vmap of grad")
def _(f: Function, nested: Function) -> Function:
    return lambda *a: mapped_over(gradients(f), *by_itself(a))(*a)


@of("grad of vmap")
def _(f: Function, nested: Function) -> Function:
    def total(*a: Any) -> Any:
        return sum(jnp.sum(jnp.sin(out)) for out in mapped_over(f, (0,), every(a))(*a))

    return lambda *a: jax.grad(total, every(a))(*a)


@of("scan")
def _(f: Function, nested: Function) -> Function:
    """Over layers that each have operands of their own, and the gradient through it."""

    def layers(*a: Any) -> Any:
        stacked = tuple(jnp.stack([b, 2 * b, -b]) for b in a)
        body = lambda total, b: (total + loss(f)(*b), None)  # noqa: E731
        return jax.lax.scan(body, jnp.float32(0), stacked)[0]

    return lambda *a: jax.value_and_grad(layers, every(a))(*a)


@of("fori_loop")
def _(f: Function, nested: Function) -> Function:
    return lambda *a: jax.lax.fori_loop(
        0, 3, lambda i, total: total + loss(f)(a[0] * (i + 1), *a[1:]), jnp.float32(0)
    )


@of("while_loop")
def _(f: Function, nested: Function) -> Function:
    def body(carry: Any) -> Any:
        i, total, a = carry
        return i + 1, total + loss(f)(a[0] * (i + 1), *a[1:]), a

    return lambda *a: jax.lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.float32(0), a))[1]


@of("cond", traced=False)
def _(f: Function, nested: Function) -> Function:
    """An op to a program: with the conds of several in one, XLA of JAX 0.10 ends the process."""

    def either(*a: Any) -> Any:
        return jax.lax.cond(jnp.sum(a[0]) < jnp.inf, f, lambda *a: 2 * f(*a), *a)

    return jax.jit(lambda *a: (either(*a), gradients(either)(*a)))


@of("checkpoint")
def _(f: Function, nested: Function) -> Function:
    return gradients(jax.checkpoint(f))


@of("checkpoint policies")
def _(f: Function, nested: Function) -> Function:
    policies = jax.checkpoint_policies
    chosen = (
        policies.everything_saveable,
        policies.dots_saveable,
        policies.save_only_these_names("y"),
    )
    named = lambda *a: checkpoint_name(f(*a), "y")  # noqa: E731
    return lambda *a: [gradients(jax.checkpoint(named, policy=p))(*a) for p in chosen]


@of("custom_vjp around")
def _(f: Function, nested: Function) -> Function:
    outer = jax.custom_vjp(f)
    outer.defvjp(lambda *a: jax.vjp(f, *a), lambda pull, c: tuple(2 * g for g in pull(c)))
    return gradients(outer)


@of("donate", traced=False)
def _(f: Function, nested: Function) -> Function:
    """The buffer of a donated operand is taken by another result."""
    step = jax.jit(lambda x, *rest: (f(x, *rest), x + 1), donate_argnums=0)
    return lambda x, *rest: step(jnp.copy(x), *rest)


@of("AOT", traced=False)
def _(f: Function, nested: Function) -> Function:
    return lambda *a: jax.jit(gradients(f)).lower(*a).compile()(*a)


@of("eval_shape", traced=False)
def _(f: Function, nested: Function) -> Function:
    def shapes(*a: Any) -> Any:
        out = jax.eval_shape(lambda *a: (f(*a), gradients(f)(*a)), *a)
        return [np.array(s.shape) for s in jax.tree.leaves(out)]

    return shapes


@of("nested shard_map", mesh=True)
def _(f: Function, nested: Function) -> Function:
    return nested


@of("grad of nested shard_map", mesh=True)
def _(f: Function, nested: Function) -> Function:
    return gradients(nested)


@of("export", traced=False)
def _(f: Function, nested: Function) -> Function:
    """Serialised, and called again."""

    def exported(*a: Any) -> Any:
        step = jax.jit(lambda *a: (f(*a), gradients(f)(*a)))
        blob = jax.export.export(step)(*a).serialize()
        return jax.jit(jax.export.deserialize(blob).call)(*a)

    return exported
