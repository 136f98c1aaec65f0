"""Products of quantised operands on a GPU against float64 products of what these stand for.

Layouts, sizes and epilogues are checked with precise accumulation, whose bound is the tighter one.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardops as so
from shardops.kernels import library
from shardops.kernels.target import current_target
from tests.closeness import assert_close
from tests.kernels.scaled_calls import (
    BLOCK,
    CURRENT,
    E5M2,
    MX,
    PAIRS,
    ScaledCall,
    attribute,
    holds_no_dequantised_array,
    in_float64,
    runs_in_fp8,
)
from tests.quantize.quantisers import RECIPES

OUTS = ("float32", "bfloat16", "float16")
SIZES = {"m": 144, "n": 384, "k": 640, "b": 3, "s": 12, "h": 256}
BLOCKS = [("k", "nk"), ("k", "k"), ("mk", "k")]


@pytest.fixture(autouse=True)
def _hopper():
    if current_target().arch != "sm_90":
        pytest.skip("these products are Hopper's")


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("formats", PAIRS)
def test_one_scale_a_tensor(rng, formats, out, precise):
    call = ScaledCall(rng, "mk,nk", SIZES, CURRENT, formats, out=out, precise=precise)
    text = runs_in_fp8(call, formats, tensor_cores=True)
    assert "algo_version" in text
    assert attribute(text, "fast_accum") == int(not precise)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("blocked", BLOCKS)
@pytest.mark.parametrize("formats", PAIRS)
def test_scales_of_128(rng, formats, blocked, out):
    """Five blocks of k, and a last block of m and n that is not whole."""
    call = ScaledCall(rng, "mk,nk", SIZES, BLOCK, formats, blocked=blocked, out=out)
    text = runs_in_fp8(call, formats, tensor_cores=True)
    holds_no_dequantised_array(text.replace("f8E5M2", "f8E4M3FN"), (144, 640), (384, 640))


@pytest.mark.parametrize("mode", [CURRENT, BLOCK])
@pytest.mark.parametrize("text", ["mk,kn", "km,nk", "km,kn", "bsk,kn", "msh,nsh", "smh,hns"])
def test_layouts(rng, text, mode):
    along = "h" if "h" in text else "k"
    blocked = (along, f"n{along}") if mode is BLOCK else None
    call = ScaledCall(rng, text, SIZES, mode, blocked=blocked, out="float32", precise=True)
    runs_in_fp8(call, tensor_cores=True)


@pytest.mark.parametrize("text", ["bmk,bnk", "mbk,bkn"])
def test_batches_of_one_scale(rng, text):
    call = ScaledCall(rng, text, SIZES, CURRENT, batch="b", out="float32", precise=True)
    runs_in_fp8(call, tensor_cores=True)


@pytest.mark.parametrize("mode", [CURRENT, BLOCK])
@pytest.mark.parametrize("extra", [{}, {"bias": "bfloat16"}, {"add": "float32"}], ids=str)
@pytest.mark.parametrize(
    "m, n, k",
    [(1, 1, 1), (7, 33, 65), (1, 4096, 1000), (1001, 8, 200), (999, 1003, 1001), (129, 127, 128)],
)
def test_odd_sizes(rng, m, n, k, extra, mode):
    sizes, blocked = {"m": m, "n": n, "k": k}, ("k", "nk") if mode is BLOCK else None
    epilogue = "bias" if "bias" in extra else "none"
    call = ScaledCall(
        rng,
        "mk,nk",
        sizes,
        mode,
        blocked=blocked,
        epilogue=epilogue,
        out="float32",
        precise=True,
        **extra,
    )
    runs_in_fp8(call, tensor_cores=True)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("bias", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("epilogue", ["none", "gelu", "gelu_aux"])
@pytest.mark.parametrize("mode", [CURRENT, BLOCK])
def test_epilogues(rng, mode, epilogue, bias, out):
    asked = "bias" if bias and epilogue == "none" else epilogue
    blocked = ("k", "nk") if mode is BLOCK else None
    call = ScaledCall(
        rng,
        "mk,nk",
        SIZES,
        mode,
        blocked=blocked,
        epilogue=asked,
        bias=bias,
        add=out,
        out=out,
        precise=True,
    )
    runs_in_fp8(call, tensor_cores=True)


@pytest.mark.parametrize("epilogue", ["none", "bias", "gelu", "gelu_aux"])
def test_is_one_fused_call(rng, epilogue):
    """An epilogue that cuBLASLt refused would still give the right values."""
    bias = None if epilogue == "none" else "bfloat16"
    call = ScaledCall(
        rng, "mk,nk", SIZES, CURRENT, epilogue=epilogue, bias=bias, add="bfloat16", out="bfloat16"
    )
    refused = library.core().counters()["algorithms_refused"]
    text = runs_in_fp8(call, tensor_cores=True)
    assert attribute(text, "add") == 1
    assert attribute(text, "bias") == int(bias is not None)
    assert attribute(text, "gelu") == int(epilogue in ("gelu", "gelu_aux"))
    assert library.core().counters()["algorithms_refused"] == refused


@pytest.mark.parametrize(
    "mode, formats, blocked",
    [(CURRENT, (E5M2, E5M2), None), (MX, PAIRS[0], None), (MX, PAIRS[1], None)],
)
def test_in_bfloat16_the_values_are_exact(rng, mode, formats, blocked):
    call = ScaledCall(rng, "mk,nk", SIZES, mode, formats, blocked=blocked, out="float32")
    call.check()
    assert attribute(call.text(), "type") == 14


def test_128_by_128_on_both_is_dequantised(rng):
    call = ScaledCall(rng, "mk,nk", SIZES, BLOCK, blocked=("mk", "nk"), out="float32")
    call.check()
    assert attribute(call.text(), "type") == 0


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_forward_and_backward_products_of_a_layer(rng, recipe):
    """Rows and columns of each array: no 8-bit transposition is left to do, and one call each."""
    x, w, dy = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((256, 384), (384, 512), (256, 512))
    )
    of = RECIPES[recipe].quantizer
    quantize = jax.jit(lambda x, q: so.quantize(x, q).detach())
    qx = quantize(x, of("input", layout="both"))
    qw = quantize(w, of("kernel", layout="both"))
    qdy = quantize(dy, of("gradient", layout="both"))
    products = {
        "forward": (qx, qw, ((1,), (0,)), qx, qw.transposed),
        "dgrad": (qdy, qw, ((1,), (1,)), qdy, qw),
        "wgrad": (qx, qdy, ((0,), (0,)), qx.transposed, qdy.transposed),
    }
    for name, (lhs, rhs, dims, of_lhs, of_rhs) in products.items():
        function = jax.jit(
            partial(so.gemm, contracting_dims=dims, out_dtype="float32", precise_accumulation=True)
        )
        got = function(lhs, rhs)
        want = in_float64(of_lhs) @ in_float64(of_rhs).T
        assert_close(got, want, reduced=1, dtype=np.float16, what=name)
        text = function.lower(lhs, rhs).as_text()
        assert attribute(text, "type") in (28, 29)
        assert attribute(text, "fast_accum") == 0
        assert "stablehlo.transpose" not in text


def test_in_command_buffers(rng):
    """Replays of a CUDA graph launch nothing through the handler; each call has its own scale."""
    call = ScaledCall(rng, "mk,nk", SIZES, CURRENT, epilogue="bias", bias="bfloat16")
    x, sx, w, sw, bias = call.operands

    @jax.jit
    def chain(sx):
        return [call.function(x, sx * i, w, sw, bias)[0] for i in range(1, 9)]

    launched = []
    for _ in range(20):
        before = library.core().counters()["gemms_launched"]
        outs = jax.block_until_ready(chain(sx))
        launched.append(library.core().counters()["gemms_launched"] - before)
    assert launched[-1] == 0, f"launches of each run: {launched}"
    product = call.want[0] - np.asarray(bias).astype(np.float64)
    for i, out in enumerate(outs, 1):
        want = product * i + np.asarray(bias).astype(np.float64)
        assert_close(out, want, reduced=640)


TE_SIZES = [(64, 32, 64), (64, 128, 128)]  # m, n, k


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("m, n, k", [*TE_SIZES, (1, 1, 1), (33, 7, 130), (256, 384, 512)])
@pytest.mark.parametrize("dims", [((1,), (0,)), ((1,), (1,)), ((0,), (0,)), ((0,), (1,))])
def test_dense_forward_and_backward(rng, name, m, n, k, dims):
    """TransformerEngine's cases and odd ones: values, and cotangents by the values multiplied."""
    ((i,), (j,)) = dims
    x, w, dz = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
        for s in ((m, k) if i else (k, m), (n, k) if j else (k, n), (m, n))
    )
    of = RECIPES[name].quantizer

    @jax.jit
    def run(x, w, dz):
        def f(x, w):
            a, b = so.quantize(x, of("input")), so.quantize(w, of("kernel"))
            options = {"contracting_dims": dims, "precise_accumulation": True}
            return so.gemm(a, b, out_dtype="float32", **options), (a.detach(), b.detach())

        out, pull, scaled = jax.vjp(f, x, w, has_aux=True)
        return out, pull(dz.astype(jnp.float32)), scaled

    out, (dx, dw), (a, b) = run(x, w, dz)
    lhs, rhs = in_float64(a), in_float64(b)
    lhs, rhs = lhs if i else lhs.T, rhs.T if j else rhs
    dz = np.asarray(dz).astype(np.float64)
    assert_close(out, lhs @ rhs, reduced=k, dtype=np.float16)
    assert_close(dx, dz @ rhs.T if i else (dz @ rhs.T).T, reduced=n, what="dx")
    assert_close(dw, (lhs.T @ dz).T if j else lhs.T @ dz, reduced=m, what="dw")


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_nothing_stands_between_quantisation_and_product(rng, recipe):
    """Rows of x and columns of w as they are written, and scales too: no copy, no transpose."""
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((4, 256, 512), (512, 384)))
    of = RECIPES[recipe].quantizer
    quantizers = of("input", layout="both"), of("kernel", layout="both")

    @jax.jit
    def forward(x, w, quantizers):
        a, b = (so.quantize(v, q) for v, q in zip((x, w), quantizers, strict=True))
        return so.gemm(a, b, out_dtype="bfloat16")

    program = forward.lower(x, w, quantizers).compile().as_text()
    entry = program[program.index("ENTRY") :]
    calls = re.findall(r'custom_call_target="([^"]+)"', entry)
    assert calls.count("shardops_gemm") == 1
    assert calls.count("shardops_launch") == 2 * (1 + (recipe == "current"))
    moved = re.findall(r"= \S+ (?:copy|transpose)\(", entry)
    of_blocks = re.findall(r"= \(?f32\[\d+,\d+[^ ]* (?:fusion|pad)\(", entry)
    assert not moved, moved
    assert not of_blocks, of_blocks
