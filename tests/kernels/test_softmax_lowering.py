"""softmax lowered for CUDA on a machine that has none: the custom calls and what they carry."""

import jax
import jax.numpy as jnp
import pytest

import shardops as so
from shardops import errors
from shardops.kernels import compile
from shardops.kernels.target import target_for, use_target
from tests.kernels.lowering import GPU, launches, lowered

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("extension_is_not_needed")
OLD = target_for("sm_80", 108)


X = ((8, 16, 1024, 1024), jnp.bfloat16)


def test_softmax_and_its_gradient_are_one_launch_each():
    def step(x, dy):
        y, pull = jax.vjp(lambda x: so.softmax(x, scale=0.125, causal="upper_left"), x)
        return y, pull(dy)

    rows = 8 * 16 * 1024
    forward, backward = launches(lowered(step, X, X))
    assert forward == ("softmax_forward", 1, rows // 4)
    assert backward[:2] == ("softmax_backward", 2)


def test_mask_is_read_as_it_is():
    """No broadcast of the mask is left in the program."""
    text = lowered(lambda x, mask: so.softmax(x, mask=mask), X, ((8, 1, 1, 1024), jnp.bool_))
    assert [call[:2] for call in launches(text)] == [("softmax_forward", 2)]
    assert "8x16x1024x1024xi1" not in text
    assert "8x1x1x1024xi1" in text


def test_kernels_are_chosen_by_length_and_gpu():
    def names(keys, target):
        rows = 2**24 // keys
        text = lowered(lambda x: so.softmax(x), ((rows, keys), jnp.bfloat16), target=target)
        return [name for name, *_ in launches(text)]

    assert names(33, GPU) == ["softmax_forward_tile"]
    assert names(4096, GPU) == ["softmax_forward"]
    assert names(2**15, GPU) == ["softmax_forward"]
    assert names(2**18, GPU) == ["softmax_forward_staged"]
    assert names(2**20, GPU) == ["softmax_forward_resident"]
    assert names(2**22, GPU) == ["softmax_forward_long"]
    assert names(2**18, OLD) == ["softmax_forward_long"] * 2


@pytest.mark.parametrize(("scale", "forward"), [(1.17e38, 1), (-1.17e38, 1), (-1.19e38, 0)])
def test_scale_too_large_for_the_kernel_goes_without(scale, forward):
    """2 log2(e) times it is no float32."""
    step = jax.grad(lambda x: so.softmax(x, scale=scale)[0, 0])
    names = [name for name, *_ in launches(lowered(step, ((8, 1024), jnp.float32)))]
    assert names == ["softmax_forward"] * forward + ["softmax_backward"]


def test_sharded_queries_bring_their_offset_as_an_operand():
    mesh = jax.make_mesh((4,), ("sp",), axis_types=(jax.sharding.AxisType.Explicit,))

    def step(x, dy):
        y, pull = jax.vjp(lambda x: so.softmax(x, causal="upper_left"), x)
        return y, pull(dy)[0]

    with jax.set_mesh(mesh), use_target(GPU):
        spec = jax.sharding.NamedSharding(mesh, jax.P(None, "sp", None))
        x = jax.ShapeDtypeStruct((2, 64, 256), jnp.float32, sharding=spec)
        text = jax.jit(step).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert [call[:2] for call in launches(text)] == [
        ("softmax_forward", 2),
        ("softmax_backward", 3),
    ]


def test_nothing_is_launched_where_there_is_nothing():
    text = lowered(lambda x: so.softmax(x), ((3, 0, 64), jnp.float32))
    assert launches(text) == []
    with so.use_kernels(""):
        assert launches(lowered(lambda x: so.softmax(x), X)) == []
