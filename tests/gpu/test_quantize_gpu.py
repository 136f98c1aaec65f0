"""The quantising kernels on a GPU: bits of the reference on a CPU, alone and in the norms."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardops as so
from shardops.primitives.norm_local import local_forward
from shardops.primitives.quantize_local import Form, quantized
from shardops.rules.quantize import Blocks
from tests import references
from tests.kernels.quantize_problems import ODD, same
from tests.quantize.quantisers import FORMATS, LAYOUTS, RECIPES, ROLES, bits, wide_range

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Whole tiles, cut ones, odd lengths, blocks that end with a dim of the rows and that do not, one
# element, one row.
SHAPES = (
    (256, 384),
    (1000, 2880),
    (130, 33),
    (3, 40, 136),
    (2, 256, 136),
    (2, 3, 160),
    (1, 1),
    (7, 4097),
)
CASES = list(itertools.product(RECIPES, ROLES, LAYOUTS))


def draw(rng, shape, dtype):
    x = wide_range(rng, shape)
    flat = x.reshape(-1)
    if flat.size > 1000:
        x[..., :1, :] = 0
        for value, at in zip(itertools.cycle(ODD), rng.integers(0, flat.size, 24)):
            flat[at] = value
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def on(platform, f, *arguments):
    with jax.default_device(jax.devices(platform)[0]):
        return jax.tree.leaves(jax.tree.map(np.asarray, jax.jit(f)(*arguments)))


def check_same(got, want, what):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), what
        assert same(one, other), (what, one.dtype)


def check_close(got, want, what):
    """Scales and magnitudes within a few roundings; data in all but 1 % of places the same."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), what
        if one.dtype.itemsize == 1:
            nan = np.isnan(one.astype(np.float32)) & np.isnan(other.astype(np.float32))
            equal = one.view(np.uint8) == other.view(np.uint8)
            assert (equal | nan).mean() > 0.99, (what, one.dtype)  # E5M2 has several NaNs
        else:
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=str(what))


@pytest.mark.parametrize("recipe, role, layout", CASES)
def test_quantized_bits_are_those_of_a_cpu(recipe, role, layout, rng):
    """Types take turns over shapes, so that each recipe and layout meets all of them."""
    turn = CASES.index((recipe, role, layout))
    quantizer = RECIPES[recipe].quantizer(role, layout=layout)
    quantizer = quantizer.update(jnp.float32(900))
    for n, shape in enumerate(SHAPES):
        x = draw(rng, shape, DTYPES[(n + turn) % 3])
        f = lambda x, q: so.quantize(x, q).detach()  # noqa: E731
        found = [on(platform, f, x, quantizer) for platform in ("cuda", "cpu")]
        check_same(*found, (shape, x.dtype))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_entry_of_a_vmap_has_its_scales(recipe, dtype, rng):
    quantizer = RECIPES[recipe].quantizer("input", "both")
    x = draw(rng, (3, 5, 160, 200), dtype)
    f = jax.vmap(jax.vmap(lambda x, q: so.quantize(x, q).detach(), (0, None)), (0, None))
    check_same(*[on(platform, f, x, quantizer) for platform in ("cuda", "cpu")], recipe)


@pytest.mark.parametrize("recipe, layout", list(itertools.product(RECIPES, LAYOUTS)))
def test_slice_of_an_array_needs_no_alignment(recipe, layout, rng):
    quantizer = RECIPES[recipe].quantizer("input", layout)
    for dtype in DTYPES:
        x = draw(rng, (131, 1001), dtype)
        f = lambda x, q: so.quantize(x[1:, :], q).detach()  # noqa: E731
        check_same(*[on(p, f, x, quantizer) for p in ("cuda", "cpu")], dtype)


NORM_SHAPES = ((64, 512), (3, 40, 1000), (130, 333), (9, 4096), (33, 16384), (2, 65536), (257, 24))
NORM_CASES = list(
    itertools.product(["rms", "layer"], ["delayed", "block", "square", "mxfp8"], LAYOUTS)
)


def form_of(recipe, layout, role):
    recipe, role = ("block", "kernel") if recipe == "square" else (recipe, role)
    quantizer = RECIPES[recipe].quantizer(role, layout)
    return Form(quantizer.format, quantizer.mode, Blocks(layout, quantizer.block))


def check_norm(rng, shape, kind, form, x_type, gamma_type, add, zero):
    """Bits of the reference, given the kernel's own statistics; these against float64."""
    x, residual = (rng.standard_normal(shape, np.float32).astype(x_type) for _ in range(2))
    x[..., :1, 1] = np.inf
    gamma = rng.standard_normal(shape[-1], np.float32).astype(gamma_type)
    scale_inv = jnp.float32(0.013)
    f = partial(
        local_forward, kind=kind, beta=False, add=add, epsilon=1e-5,
        zero_centered_gamma=zero, form=form, wide=False, kernel=True,
    )  # fmt: skip
    operands = [x, gamma, *([residual] if add else []), *([scale_inv] if form.given else [])]
    *got, rstd = on("cuda", f, *operands)
    mean = got.pop() if kind == "layer" else np.zeros_like(rstd)
    h = x
    if add:
        h = (x.astype(np.float32) + residual.astype(np.float32)).astype(x_type)
        assert bits(got.pop()) == bits(h)
    with np.errstate(all="ignore"):
        wide = h.astype(np.float64)
        centre = wide.mean(-1) if kind == "layer" else 0 * wide[..., 0]
        exact = 1 / np.sqrt(((wide - centre[..., None]) ** 2).mean(-1) + 1e-5)
        np.testing.assert_allclose(rstd, exact, rtol=4e-6)
        y = (h.astype(np.float32) - mean[..., None]) * rstd[..., None]
        y = y * (gamma.astype(np.float32) + np.float32(zero))
    given = (scale_inv,) if form.given else ()
    want = on("cpu", lambda y, *s, form=form: quantized(y, *s, form=form), y, *given)
    # Rows too long for the kernel of both take the norm's own, which may round once less.
    check = check_close if shape[-1] > 32768 and x_type != jnp.float32 else check_same
    check(got, want, (shape, x_type, add, zero))


@pytest.mark.parametrize("kind, recipe, layout", NORM_CASES)
def test_norms_quantise_their_float32_values(kind, recipe, layout, rng):
    turn = NORM_CASES.index((kind, recipe, layout))
    for n, shape in enumerate(NORM_SHAPES):
        x_type, gamma_type = DTYPES[(n + turn) % 3], DTYPES[(n + turn // 3) % 3]
        add, zero = (n + turn) % 2 == 0, (n + turn) % 4 < 2
        form = form_of(recipe, layout, ROLES[2 * (turn % 2)])
        check_norm(rng, shape, kind, form, x_type, gamma_type, add, zero)


# More rows than a GPU has at once: of groups of lanes, of warps, of blocks, of clusters.
MANY_ROWS = ((9001, 256), (5003, 1000), (1300, 4104), (301, 16384), (201, 32768), (150, 65536))


@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_quantise_many_rows(kind, recipe, rng):
    for n, shape in enumerate(MANY_ROWS):
        form = form_of(recipe, "rows", ROLES[0])
        check_norm(rng, shape, kind, form, DTYPES[1], DTYPES[n % 3], False, n % 2 == 0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind, layout", list(itertools.product(["layer", "rms"], LAYOUTS)))
def test_quantized_norm_is_within_its_format(kind, recipe, layout, rng):
    """Of the public function, against float64, both parts of it."""
    x = rng.standard_normal((96, 512), np.float32).astype(jnp.bfloat16)
    gamma, beta = rng.standard_normal((2, 512), np.float32)
    quantizer = RECIPES[recipe].quantizer("input", layout)
    vectors = (gamma, beta) if kind == "layer" else (gamma,)
    norm, want = (
        (so.layer_norm, references.layer_norm_reference)
        if kind == "layer"
        else (so.rms_norm, references.rms_norm_reference)
    )
    got = jax.jit(lambda x, v, q: norm(x, *v, quantizer=q))(x, vectors, quantizer)
    relative, smallest, _ = FORMATS["float8_e4m3fn"]
    wanted = want(x, *vectors).y
    # An eighth of what is above the format's largest value is lost by scales of MXFP8 at most.
    lost = 0.125 if recipe == "mxfp8" else relative
    parts = [(got, wanted)] if layout != "columns" else []
    parts += [(got.transposed, wanted.T)] if layout != "rows" else []
    for part, exact in parts:
        values = np.asarray(part.dequantize(jnp.float32)).astype(np.float64)
        step = np.asarray(part.scale_inv).astype(np.float64).max()
        error = np.abs(values - exact)
        assert (error <= lost * 1.01 * np.abs(exact) + 2 * smallest * step + 1e-6).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_runs_give_the_same_bits(layout, rng):
    """Twenty runs of one executable: its counters are cleared each time, in replayed graphs too."""
    x = rng.standard_normal((2048, 4096), np.float32).astype(jnp.bfloat16)
    quantizer = RECIPES["delayed"].quantizer("input", layout)
    gamma = rng.standard_normal(4096, np.float32)

    @jax.jit
    def step(x, gamma, quantizer):
        y = so.rms_norm(x, gamma, quantizer=quantizer).detach()
        return y, so.quantize(x, quantizer).detach()

    first = bits(step(x, gamma, quantizer))
    for _ in range(20):
        assert bits(step(x, gamma, quantizer)) == first


def test_largest_magnitude_of_a_norm_is_that_of_its_values(rng):
    x = rng.standard_normal((4096, 1024), np.float32).astype(ml_dtypes.bfloat16)
    gamma = jnp.ones(1024, jnp.float32)
    quantizer = RECIPES["delayed"].quantizer()
    got = jax.jit(lambda x, q: so.rms_norm(x, gamma, quantizer=q).amax)(x, quantizer)
    want = np.abs(references.rms_norm_reference(x, np.ones(1024)).y).max()
    np.testing.assert_allclose(got, want, rtol=1e-5)
