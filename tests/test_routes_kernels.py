"""use_kernels and SHARDOPS_KERNELS: which ops run as kernels, and what a jitted function keeps."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import shardops as so

X, W, GAMMA = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones(8)


def _step(x, w, gamma):
    return jax.grad(lambda x: jnp.sum(so.gemm(so.rms_norm(x, gamma), w)))(x)


def _kernels(f=_step) -> dict[str, set[bool]]:
    """{primitive: the values of its `kernel` flag} in the traced program."""
    text = re.sub(r"\s+", " ", str(jax.make_jaxpr(f)(X, W, GAMMA)))
    out: dict[str, set[bool]] = {}
    for name, body in re.findall(r"(shardops_\w+)\[(.*?)\]", text):
        flag = re.search(r"kernel=(True|False)", body)
        assert flag, body
        out.setdefault(name, set()).add(flag[1] == "True")
    return out


def test_use_kernels_all_by_default():
    assert _kernels() == {
        "shardops_gemm": {True},
        "shardops_norm_forward": {True},
        "shardops_norm_backward": {True},
    }


@pytest.mark.parametrize(
    "pattern, gemm, forward, backward",
    [
        ("", {False}, False, False),
        (".*", {True}, True, True),
        ("gemm", {True, False}, False, False),  # the product of the gradient is gemm.grad
        (r"gemm.*", {True}, False, False),
        (r"rms_norm", {False}, True, False),
        (r".*\.grad", {True, False}, False, True),
        (r"layer_norm|gemm\.grad", {True, False}, False, False),
    ],
)
def test_use_kernels_chooses_by_name(pattern, gemm, forward, backward):
    with so.use_kernels(pattern):
        found = _kernels()
    assert found["shardops_norm_forward"] == {forward}
    assert found["shardops_norm_backward"] == {backward}
    assert found["shardops_gemm"] <= gemm


def test_use_kernels_restores_what_was_there():
    before = _kernels()
    with so.use_kernels("gemm.*"):
        outer = _kernels()
        with so.use_kernels(""):
            assert _kernels()["shardops_gemm"] == {False}
        assert _kernels() == outer
        with pytest.raises(RuntimeError, match="inside"), so.use_kernels("rms_norm"):
            raise RuntimeError("inside")
        assert _kernels() == outer
    assert _kernels() == before


def test_use_kernels_reaches_a_function_jitted_before():
    """The pattern is part of the cache key: traced again inside, and not again outside."""
    traces = []

    @jax.jit
    def step(x, w):
        traces.append(_flag(x, w))
        return so.gemm(x, w)

    def _flag(x, w):
        return "kernel=True" in str(jax.make_jaxpr(so.gemm)(x, w))

    step(X, W)
    with so.use_kernels(""):
        step(X, W)
        step(X, W)
    step(X, W)
    with so.use_kernels(""):
        step(X, W)
    assert traces == [True, False]


def test_use_kernels_changes_no_value():
    with so.use_kernels(""):
        off = jax.jit(_step)(X, W, GAMMA)
    assert (off == jax.jit(_step)(X, W, GAMMA)).all()


@pytest.mark.parametrize(("pattern", "error"), [("(", ValueError), (None, TypeError)])
def test_use_kernels_refuses(pattern, error):
    says = r"use_kernels: pattern is .+; expected a regular expr"
    with pytest.raises(error, match=says), so.use_kernels(pattern):
        pass


PROGRAM = """
import jax, jax.numpy as jnp, shardops as so
print("kernel=True" in str(jax.make_jaxpr(so.gemm)(jnp.ones((2, 2)), jnp.ones((2, 2)))))
"""


@pytest.mark.parametrize("value, answer", [("", "False"), ("gemm", "True"), ("rms_norm", "False")])
def test_environment_chooses_kernels(value, answer):
    done = _python(PROGRAM, SHARDOPS_KERNELS=value)
    assert done.stdout.strip() == answer, done.stderr


def test_environment_is_refused_by_name():
    done = _python(PROGRAM, SHARDOPS_KERNELS="(")
    assert done.returncode != 0
    assert "SHARDOPS_KERNELS is '('; expected a regular expression" in done.stderr


def _python(program: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
