"""The norms lowered for CUDA on a machine that has none: the custom calls and what they carry."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import shardops as so
from shardops import errors
from shardops.kernels import compile, norm
from shardops.kernels.target import current_target, target_for, use_target
from tests.kernels.lowering import grids, lowered

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("extension_is_not_needed")


def test_forward_is_one_launch_with_a_block_a_row():
    forward = partial(norm.norm_forward, kind="layer", epsilon=1e-6, zero_centered_gamma=False)
    text = lowered(
        lambda x, gamma, beta: forward(x, gamma, beta, None),
        ((4096, 4096), jnp.bfloat16),
        ((4096,), jnp.float32),
        ((4096,), jnp.float32),
    )
    assert grids(text) == [("norm_forward", 4096)]


def test_backward_is_two_launches_of_resident_blocks():
    def backward(dy, x, gamma, rstd):
        return norm.norm_backward(
            dy, x, gamma, None, rstd, None, kind="rms", zero_centered_gamma=False, beta=False
        )

    shapes = [((8192, 4096), jnp.bfloat16)] * 2 + [((4096,), jnp.bfloat16), ((8192,), jnp.float32)]
    for count in (132, 100):  # one with a table of launch shapes, one without
        target = target_for("sm_90", count)
        (first, blocks), (second, tiles) = grids(lowered(backward, *shapes, target=target))
        assert (first, second) == ("norm_backward_staged", "norm_finish")
        assert blocks % count == 0
        assert tiles * 32 >= 4096


def test_kernels_of_a_gradient_are_begun_before_the_first_is_waited_for(monkeypatch):
    asked = []

    def cubin(file, name, constants, arch):
        asked.append(("wait", name, constants))
        return b"code"

    monkeypatch.setattr(compile, "cubin", cubin)
    monkeypatch.setattr(
        compile,
        "begin",
        lambda file, name, constants, arch: asked.append(("begin", name, constants)),
    )
    shapes = ((512, 1000), jnp.bfloat16), ((1000,), jnp.float32)
    for return_input in (False, True):  # the kernel with a cotangent of h is another one
        norm_of = partial(so.layer_norm, return_input=return_input)

        def gradient(x, gamma, norm_of=norm_of):
            y, pull = jax.vjp(norm_of, x, gamma, gamma)
            return pull(y)

        asked.clear()
        lowered(gradient, *shapes)
        begun = [rest for what, *rest in asked[:2] if what == "begin"]
        waited = [rest for what, *rest in asked if what == "wait"]
        assert [name for name, _ in waited] == ["norm_forward", "norm_backward", "norm_finish"]
        assert begun == waited[1:]
        assert dict(begun[0][1])["HAS_ADD"] == return_input

    asked.clear()
    lowered(lambda x, gamma: so.layer_norm(x, gamma, gamma), *shapes)
    with so.use_kernels("layer_norm"):  # not its gradient
        lowered(gradient, *shapes)
    assert [(what, name) for what, name, _ in asked] == [("wait", "norm_forward")] * 2


def test_target_is_part_of_the_jit_key():
    """The same jitted function, lowered for two GPUs, carries two kernels."""
    forward = partial(norm.norm_forward, kind="rms", epsilon=1e-6, zero_centered_gamma=False)
    function = jax.jit(lambda x, gamma: forward(x, gamma, None, None))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64), (64,))]
    texts = []
    for arch in ("sm_80", "sm_90", "sm_80"):
        with use_target(target_for(arch, 108)):
            texts.append(function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text())
    assert texts[0] == texts[2] != texts[1]


def test_missing_gpu_is_an_error_that_names_the_fix():
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this machine has a GPU")
    with pytest.raises(errors.KernelUnavailableError, match=r"extra cuda13.*use_target"):
        current_target()
