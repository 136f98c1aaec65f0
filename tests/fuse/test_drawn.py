"""Drawn programs: random chains of sums, norms, products, activations and control flow.

Each is fused and compared with itself, values and gradients; and what the report says is what is in
the program: no op is lost or made twice, each fusion is in one op.
"""

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import shardops as so
from tests import meshes
from tests.closeness import assert_close
from tests.fuse.programs import draw, ops_in, values_and_gradients

ROWS, WIDTH = 4, 8
EXAMPLES = 8
ACTIVATIONS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu, "sin": jnp.sin}
AROUND = {
    "jit": lambda body: jax.jit(body),
    "checkpoint": lambda body: jax.checkpoint(body),
    "scan": lambda body: lambda p, x: jax.lax.scan(lambda x, _: (body(p, x), None), x, None, 2)[0],
    "cond": lambda body: lambda p, x: jax.lax.cond(x[0, 0] > 0, body, lambda p, x: x, p, x),
}

number = st.integers(0, 1000)  # of an array made so far, counted from the last one
step = st.one_of(
    st.tuples(st.just("add"), number, number),
    st.tuples(st.just("add"), st.just(0), number),
    st.tuples(st.just("norm"), number, st.sampled_from(["rms", "layer"])),
    st.tuples(st.just("norm"), st.just(0), st.sampled_from(["rms", "layer"])),
    st.tuples(st.just("adaptive"), number, number),
    st.tuples(st.just("gemm"), number, st.booleans(), st.sampled_from([None, *ACTIVATIONS])),
    st.tuples(st.just("scale"), number),
)
steps = st.lists(step, min_size=2, max_size=7)
program = st.tuples(steps, st.sampled_from([None, *AROUND]), steps, st.sets(number, max_size=2))


def run(drawn: list, results: set[int], p: dict[str, Any], x: Any) -> list[Any]:
    """The last array, and those of the numbers in `results`."""
    made = [x, jnp.cos(x)]

    def at(n: int) -> Any:
        return made[-1 - n % len(made)]

    for kind, *what in drawn:
        one = at(what[0])
        if kind == "add":
            made.append(one + at(what[1]))
        elif kind == "norm" and what[1] == "rms":
            made.append(so.rms_norm(one, p["gamma"]))
        elif kind == "norm":
            made.append(so.layer_norm(one, p["gamma"], p["bias"]))
        elif kind == "adaptive":
            made.append(so.rms_norm(one, 1 + 0.1 * jnp.tanh(at(what[1]).mean(0))))
        elif kind == "gemm":
            z = so.gemm(one, p["w"])
            z = z + p["bias"] if what[1] else z
            made.append(z if what[2] is None else ACTIVATIONS[what[2]](z))
        else:
            made.append(one * 0.5)
    return [made[-1], *(at(n) for n in results)]


def function_of(drawn: Any) -> Any:
    first, around, second, results = drawn

    def fn(p: dict[str, Any], x: Any) -> list[Any]:
        if around is not None:
            x = AROUND[around](lambda p, x: run(first, set(), p, x)[0])(p, x)
        return run(second, results, p, x)

    return fn


def total(ops: Any, *names: str) -> int:
    return sum(n for name, n in ops.items() if name.split(",")[0] in names)


def assert_fuses_well(drawn: Any) -> set[str]:
    """Compare one program with itself; the kinds of fusions in it."""
    rng = np.random.default_rng(0)
    p = {"gamma": draw(rng, WIDTH), "w": draw(rng, WIDTH, WIDTH), "bias": draw(rng, WIDTH)}
    x = draw(rng, ROWS, WIDTH)
    fn = function_of(drawn)
    fused = so.fuse(fn)
    ops = [ops_in(jax.make_jaxpr(f)(p, x)) for f in (fn, fused)]
    report = fused.report
    assert total(ops[0], "norm") == total(ops[1], "norm")
    assert total(ops[0], "gemm") == total(ops[1], "gemm")
    assert ops[1]["norm, add"] == report.count("add")
    of_bias = sum(n for name, n in ops[1].items() if name.endswith("of bias"))
    assert of_bias == report.count("bias") + report.count("bias+activation")
    want, got = (jax.jit(values_and_gradients(f))(p, x) for f in (fn, fused))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, reduced=4096, what=str(report))
    return {f.kind for f in report.fused}


def test_drawn_programs() -> None:
    seen = set()

    @hypothesis.settings(max_examples=EXAMPLES)
    @hypothesis.given(program)
    def compare(drawn: Any) -> None:
        seen.update(assert_fuses_well(drawn))

    with meshes.entered("auto", {"one": 1}):  # one device: cheaper to compile, the same to fuse
        compare()
    assert seen == {"add", "return_input", "bias", "activation", "bias+activation"}
