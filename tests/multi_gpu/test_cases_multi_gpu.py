"""Case 35: kernels on a second GPU, from another thread first, then on the first, then on both."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops.kernels import library
from tests import cases, references
from tests.closeness import assert_close, assert_shards_close
from tests.primitives import test_softmax_reference as oracle

ROWS, LENGTH = 24, 1736  # a length of no other test: the first use in this process is here


def step(x, gamma, dy, weight):
    """A norm, a softmax and a product, and the gradients of the first two."""
    y, pull = jax.vjp(so.rms_norm, x, gamma)
    p, pull_softmax = jax.vjp(so.softmax, x)
    return y, *pull(dy), p, *pull_softmax(dy), so.gemm(y, weight)


def wanted(x, gamma, dy, weight):
    norm = references.rms_norm_reference(x, gamma).y
    cotangents = references.rms_norm_vjp_reference(dy, x, gamma)
    softmax = oracle.softmax_reference(x), oracle.softmax_vjp_reference(dy, x)
    return norm, cotangents.x, cotangents.gamma, *softmax, norm @ weight.astype(np.float64)


def check(got, want, dtype, assertion=assert_close):
    names = ("y", "dx", "dgamma", "softmax", "dx of softmax", "product")
    for name, one, other in zip(names, got, want, strict=True):
        # The product is of the rounded y.
        roundings = {"dx": 2, "dx of softmax": 6, "product": 2}.get(name, 1)
        assertion(one, other, reduced=LENGTH, roundings=roundings, what=f"{dtype}: {name}")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_case_35_second_gpu_from_a_thread_then_the_first_then_both(dtype, rng):
    shapes = ((ROWS, LENGTH), (LENGTH,), (ROWS, LENGTH), (LENGTH, 64))
    operands = [cases.random(rng, shape, dtype) for shape in shapes]
    want = wanted(*operands)
    gpus = jax.devices("cuda")
    before = library.core().counters()["cubins_loaded"]
    failed: list[BaseException] = []

    def on(device):
        got = jax.jit(step)(*(jax.device_put(a, device) for a in operands))
        assert all(one.devices() == {device} for one in got)
        check(got, want, dtype)

    def in_a_thread():
        try:  # a thread that has no context of CUDA's
            on(gpus[1])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    loaded = library.core().counters()["cubins_loaded"]
    assert loaded > before
    on(gpus[0])
    assert library.core().counters()["cubins_loaded"] == loaded, "one library serves every context"

    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Explicit,), devices=gpus[:2])
    specs = P("dp"), P(), P("dp"), P()
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(operands, specs, strict=True)
        ]
        got = jax.jit(step)(*placed)
    check(got, want, dtype, assert_shards_close)
