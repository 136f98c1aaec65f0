"""The softmax kernels on a GPU: values and gradients of the public function against float64."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.primitives.softmax_local import local_backward, local_forward
from tests.closeness import assert_close, epsilon
from tests.primitives import test_softmax_large
from tests.primitives import test_softmax_reference as oracle
from tests.primitives.test_softmax_large import ENDS

LENGTHS = (
    1,
    2,
    7,
    16,
    24,
    33,
    48,
    64,
    100,
    127,
    128,
    515,
    1000,
    1001,
    1024,
    3000,
    3001,
    4096,
    8192,
)
LENGTHS += (16384, 20001)
LONG = (32767, 32768, 49152, 65536, 65537, 100003, 262144, 524288, 1048576, 1200001)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Rows: one block, several a block, more than one a multiprocessor.
BATCHES = ((1, 1, 3), (2, 3, 5), (3, 2, 50), (2, 5, 90))
MASKS = (None, "batch", "heads", "queries", "rows", "all")
CAUSAL = (None, "upper_left", "bottom_right")
SCALES = (1.0, 0.125, -0.5, 3.0)
CASES = [
    pytest.param(turn, keys, dtype, id=f"{np.dtype(dtype).name}-{keys}-{turn}")
    for turn, (keys, dtype, _) in enumerate(itertools.product(LENGTHS, DTYPES, range(3)))
]
LONG_CASES = [
    pytest.param(turn, keys, dtype, id=f"{np.dtype(dtype).name}-{keys}")
    for turn, (keys, dtype) in enumerate(itertools.product(LONG, DTYPES))
]


def mask_shape(kind: str | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    batch, heads, queries, keys = shape
    return {
        None: None,
        "batch": (batch, 1, 1, keys),
        "heads": (1, heads, 1, keys),
        "queries": (batch, 1, queries, keys),
        "rows": (1, heads, queries, 1),
        "all": shape,
    }[kind]


def draw(rng: np.random.Generator, shape, dtype):
    return (2 * rng.standard_normal(shape, np.float32)).astype(dtype)


def draw_mask(rng: np.random.Generator, shape):
    mask = rng.random(shape) < 0.33
    mask.reshape(-1, shape[-1])[1:2] = True  # a row that sees nothing
    return mask


def hidden(shape, mask, last):
    """True where a key is not seen; `last` is what query 0 sees of the keys, None: all."""
    out = np.zeros(shape, bool) if mask is None else np.broadcast_to(mask, shape).copy()
    if last is not None:
        out |= np.arange(shape[-1]) > np.arange(shape[-2])[:, None] + last
    return out


def forward_float64(x, hide, scale):
    with np.errstate(all="ignore"):
        z = np.where(hide, -np.inf, scale * np.asarray(x).astype(np.float64))
        e = np.where(hide, 0, np.exp(z - z.max(-1, keepdims=True)))
        return np.where(hide, 0, e / e.sum(-1, keepdims=True))


def check_rows(got, want, unit, roundings, what):
    """Each row against its own unit: a row that sees few keys must not excuse the others.

    Below the smallest normal number of the type roundings are as large as there.
    """
    got = np.asarray(got)
    limit = roundings * epsilon(got.dtype) + 4e-6
    unit = np.maximum(unit, float(jnp.finfo(got.dtype).smallest_normal))
    error = np.abs(got.astype(np.float64) - want) / unit
    assert np.isfinite(error).all(), what
    assert error.max() <= limit, f"{what}: error {error.max():.2e}, limit {limit:.2e}"


def check(rng, shape, dtype, mask_kind, causal, scale):
    x, dy = draw(rng, shape, dtype), draw(rng, shape, dtype)
    where = mask_shape(mask_kind, shape)
    mask = None if where is None else draw_mask(rng, where)

    @jax.jit
    def step(x, dy, mask):
        y, pull = jax.vjp(lambda x: so.softmax(x, scale=scale, mask=mask, causal=causal), x)
        return y, *pull(dy)

    y, dx = map(np.asarray, step(x, dy, mask))
    last = {None: None, "upper_left": 0, "bottom_right": shape[-1] - shape[-2]}[causal]
    hide = hidden(shape, mask, last)
    want = forward_float64(x, hide, scale)
    check_rows(y, want, want.max(-1, keepdims=True), 1, "y")
    assert (y[hide] == 0).all()
    wide, dwide = want, dy.astype(np.float64)
    want_dx = scale * wide * (dwide - (wide * dwide).sum(-1, keepdims=True))
    top = np.maximum(wide.max(-1, keepdims=True), float(jnp.finfo(dtype).smallest_normal))
    unit = abs(scale) * top * np.abs(dwide).max(-1, keepdims=True)
    check_rows(dx, want_dx, unit, 3, "dx")
    assert (dx[hide] == 0).all()


@pytest.mark.parametrize("turn, keys, dtype", CASES)
def test_softmax_matches_float64(turn, keys, dtype, rng):
    """Masks, causal masks, scales and batches take turns over lengths and types."""
    shape = (*BATCHES[turn % 4 if keys < 8192 else turn % 2], keys)
    check(rng, shape, dtype, MASKS[turn * 5 // 3 % 6], CAUSAL[turn // 2 % 3], SCALES[turn // 3 % 4])


@pytest.mark.parametrize("turn, keys, dtype", LONG_CASES)
def test_softmax_of_long_rows_matches_float64(turn, keys, dtype, rng):
    shape = (1, 2, (1, 3)[turn % 2], keys)
    check(rng, shape, dtype, MASKS[turn % 6], CAUSAL[turn // 2 % 3], SCALES[turn % 4])


@pytest.mark.parametrize("keys", [16384, 49152, 65536, 262144])
def test_many_long_rows(keys, rng):
    """More rows than clusters run at once."""
    check(rng, (1, 1, 2**25 // keys, keys), jnp.bfloat16, None, None, 1.0)
    check(rng, (1, 2, 2**24 // keys, keys), jnp.bfloat16, "batch", "upper_left", 1.0)


@pytest.mark.parametrize("keys", [33, 200, 1000, 3001, 20000, 40000, 1048576])
def test_values_that_are_not_finite_act_as_in_jax_nn(keys, rng):
    x = draw(rng, (8, keys), jnp.float32)
    x[0, keys // 2], x[1, keys // 3], x[2, 5], x[3, :] = np.nan, np.inf, -np.inf, -np.inf
    x[4, : keys - 1] = -np.inf
    got, want = jax.jit(so.softmax)(x), jax.nn.softmax(x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-12)
    # A masked one does not act at all.
    mask = ~np.isfinite(x)
    got = np.asarray(jax.jit(lambda x, m: so.softmax(x, mask=m))(x, mask))
    check_rows(got, forward_float64(np.where(mask, 0, x), mask, 1.0), 1, 1, "masked")
    assert (got[mask] == 0).all()


@pytest.mark.parametrize("keys", [24, 33, 1024, 1001, 4096, 20480, 65536, 100003])
@pytest.mark.parametrize("first", [-7, 0, 13])
def test_share_of_the_queries_keeps_its_place(keys, first, rng):
    """What one device of several runs: `first` is an operand."""
    x, dy = (draw(rng, (2, 20, keys), jnp.bfloat16) for _ in range(2))
    scalar, scale = jnp.int32(first), 0.25
    later = hidden(x.shape, None, first + keys // 2)
    dy = np.where(later, np.nan, dy).astype(dy.dtype)  # what is not seen is not read

    @jax.jit
    def step(x, dy, first):
        statics = {"scale": scale, "diagonal": keys // 2, "first": True, "kernel": True}
        (y,) = local_forward(x, first, mask=False, **statics)
        (dx,) = local_backward(dy, y, first, **statics)
        return y, dx

    y, dx = map(np.asarray, step(np.where(later, np.nan, x).astype(x.dtype), dy, scalar))
    want = forward_float64(x, later, scale)
    check_rows(y, want, want.max(-1, keepdims=True), 1, "y")
    dwide = np.where(later, 0, dy.astype(np.float64))
    want_dx = scale * want * (dwide - (want * dwide).sum(-1, keepdims=True))
    unit = scale * want.max(-1, keepdims=True) * np.abs(dwide).max(-1, keepdims=True)
    check_rows(dx, want_dx, unit, 3, "dx")
    assert (y[later] == 0).all()
    assert (dx[later] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [7, 1001, 1000, 5000, 32767, 65536, 100003])
def test_softmax_of_a_slice_needs_no_alignment(keys, dtype, rng):
    """A buffer that is a slice of another may start anywhere."""
    x, dy = draw(rng, (6, keys), dtype), draw(rng, (5, keys), dtype)
    mask = draw_mask(rng, (6, keys))

    @jax.jit
    def step(x, mask, dy):
        y, pull = jax.vjp(lambda x: so.softmax(x[1:], mask=mask[1:]), x)
        return y, *pull(dy)

    y, dx = step(x, mask, dy)
    want = forward_float64(x[1:], mask[1:], 1.0)
    check_rows(y, want, want.max(-1, keepdims=True), 1, "y")
    want_dx = oracle.softmax_vjp_reference(dy, x[1:], mask[1:])
    unit = want.max(-1, keepdims=True) * np.abs(dy.astype(np.float64)).max(-1, keepdims=True)
    check_rows(np.asarray(dx)[1:], want_dx, unit, 3, "dx")


def test_mask_is_not_broadcast_in_the_compiled_program(rng):
    x, mask = draw(rng, (4, 8, 64, 256), jnp.bfloat16), draw_mask(rng, (4, 1, 1, 256))
    text = jax.jit(lambda x, m: so.softmax(x, mask=m)).lower(x, mask).compile().as_text()
    assert text.count('custom_call_target="shardops_launch"') == 1
    assert not re.search(r"pred\[4,8,64,256\]", text)


def test_no_rows_launch_nothing_and_leave_the_device_well():
    x = jnp.zeros((3, 0, 64), jnp.bfloat16)
    y, pull = jax.vjp(so.softmax, x)
    assert y.shape == pull(y)[0].shape == x.shape
    assert float(jnp.arange(8.0).sum()) == 28


@pytest.mark.parametrize(("row", "scale"), ENDS)
def test_logits_and_scales_at_the_ends_of_float32(row, scale):
    """Largest scales go without a kernel."""
    test_softmax_large.test_logits_and_scales_at_the_ends_of_float32(row * 40, scale)


@pytest.mark.parametrize("keys", [24, 2048])
def test_softmax_past_two_to_the_31_elements(keys, rng):
    rows = (2**31 + 2**20) // keys
    tail, dtail = (draw(rng, (3, keys), jnp.bfloat16) for _ in range(2))

    @jax.jit
    def step(tail, dtail):
        x = jnp.ones((rows, keys), jnp.bfloat16).at[-3:].set(tail)
        dy = jnp.ones((rows, keys), jnp.bfloat16).at[-3:].set(dtail)
        y, pull = jax.vjp(so.softmax, x)
        return y[:1], y[-4:], pull(dy)[0][-4:]

    first, y, dx = step(tail, dtail)
    assert_close(first, np.full((1, keys), 1 / keys), reduced=keys, what="first row")
    assert_close(y[:1], np.full((1, keys), 1 / keys), reduced=keys, what="last row of ones")
    assert_close(y[1:], oracle.softmax_reference(tail), reduced=keys, what="tail")
    want = oracle.softmax_vjp_reference(dtail, tail)
    assert_close(dx[1:], want, reduced=keys, roundings=6, what="dx of the tail")


@pytest.mark.parametrize("keys", [33, 1000, 4096, 32768, 65536, 2**21])
def test_repeated_runs_give_the_same_bits(keys, rng):
    """Twenty runs of one executable, so that captured command buffers are replayed too."""
    rows = max(2, min(700, 2**23 // keys))
    x, dy = (draw(rng, (rows, keys), jnp.bfloat16) for _ in range(2))

    @jax.jit
    def step(x, dy):
        y, pull = jax.vjp(lambda x: so.softmax(so.softmax(x), scale=2.0), x)
        return y, *pull(dy)

    first = [np.asarray(result).tobytes() for result in step(x, dy)]
    for _ in range(20):
        assert [np.asarray(result).tobytes() for result in step(x, dy)] == first


def test_rows_and_keys_that_no_table_has(rng):
    """Drawn shapes: what the tables leave out."""
    for _ in range(40):
        keys = int(math.exp(rng.uniform(0, math.log(60_000))))
        rows = int(math.exp(rng.uniform(0, math.log(max(2, 2**21 // keys)))))
        dtype = DTYPES[rng.integers(3)]
        shape = (1, int(rng.integers(1, 4)), max(1, rows // 4), keys)
        check(rng, shape, dtype, MASKS[rng.integers(6)], CAUSAL[rng.integers(3)], 0.5)
