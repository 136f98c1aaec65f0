"""Quantisation lowered for CUDA where there is none: which kernels, and what they are given."""

import jax.numpy as jnp
import pytest

import shardops as so
from shardops import errors
from shardops.kernels import compile, library, packing
from shardops.kernels.families import Request
from shardops.kernels.launch import Kernel
from tests.kernels.lowering import launches, lowered
from tests.quantize.quantisers import LAYOUTS, RECIPES

try:
    compile.nvrtc_version()
except errors.KernelUnavailableError as error:
    pytest.skip(f"{error}", allow_module_level=True)

X = ((6, 64, 256), jnp.bfloat16)


@pytest.fixture(autouse=True)
def _extension_is_not_needed(monkeypatch):
    monkeypatch.setattr(library, "core", lambda: None)


def quantise(recipe, layout):
    quantizer = RECIPES[recipe].quantizer("input", layout)
    return lambda x: so.quantize(x, quantizer).detach()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_is_one_launch_and_a_search_before_it_for_current_scaling(recipe, layout):
    text = lowered(quantise(recipe, layout), X)
    tensor = recipe in ("delayed", "current")
    want = [("quantize_magnitudes", 1)] * (recipe == "current")
    want += [("quantize_tiles", 1 + tensor)]
    assert [(name, operands) for name, operands, _ in launches(text)] == want


def test_kernels_write_what_the_program_returns():
    """Data and scales as they are: no conversion or transpose in XLA."""
    text = lowered(quantise("mxfp8", "both"), X)
    (call,) = [line for line in text.splitlines() if "@shardops_launch" in line]
    results = ("6x64x256xf8E4M3FN", "6x64x8xf8E8M0FNU", "256x6x64xf8E4M3FN", "256x6x2xf8E8M0FNU")
    assert call.rstrip().endswith(
        "-> (" + ", ".join(f"tensor<{result}>" for result in results) + ")"
    )
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_quantised_norm_is_one_launch_of_x_as_it_is(op, recipe, layout):
    """But for current scaling, whose scale comes after y: that takes y in float32."""
    quantizer = RECIPES[recipe].quantizer("input", layout)

    def f(x, gamma):
        vectors = (gamma, gamma) if op == "layer_norm" else (gamma,)
        y, h = getattr(so, op)(x, *vectors, add=x, return_input=True, quantizer=quantizer)
        return y.detach(), h

    text = lowered(f, X, ((256,), jnp.bfloat16))
    operands = 3 + (op == "layer_norm")
    found = [(name, count) for name, count, _ in launches(text)]
    if recipe == "current":
        searched = [("quantize_magnitudes", 1), ("quantize_tiles", 2)]
        assert found == [("norm_quantized", operands), *searched]
    else:
        name = "norm_quantized" + "_tiles" * (layout != "rows")  # a residual: rows in registers
        assert found == [(name, operands + (recipe == "delayed"))]
        assert "384x256xf32" not in text
        assert "6x64x256xf32" not in text.split("@shardops_launch")[1]


def test_columns_of_blocks_that_no_cluster_holds_take_statistics_first():
    """128 rows of so many columns: x is read twice, and h is what the first launch wrote."""
    quantizer = RECIPES["block"].quantizer("input", "both")

    def f(x, gamma):
        y, h = so.layer_norm(x, gamma, gamma, add=x, return_input=True, quantizer=quantizer)
        return y.detach(), h

    text = lowered(f, ((256, 8192), jnp.bfloat16), ((8192,), jnp.bfloat16))
    first, second = launches(text)
    assert first[:2] == ("norm_quantized", 2)
    assert second[:2] == ("norm_quantized_tiles", 5)  # h, gamma, beta, mean, rstd
    assert "8192xf32" not in text


@pytest.mark.parametrize(
    ("op", "length", "found"),
    [
        ("layer_norm", 256, ["norm_quantized_rows"]),
        ("rms_norm", 65536, ["norm_quantized_rows"]),
        ("rms_norm", 262144, ["norm_forward_resident", "quantize_tiles"]),
    ],
)
def test_rows_alone_are_one_launch_unless_too_long_for_a_cluster(op, length, found):
    quantizer = RECIPES["block" if length > 256 else "mxfp8"].quantizer()

    def f(x, gamma):
        beta = (gamma,) if op == "layer_norm" else ()
        return getattr(so, op)(x, gamma, *beta, quantizer=quantizer).detach()

    text = lowered(f, ((8, length), jnp.bfloat16), ((length,), jnp.bfloat16))
    assert [name for name, *_ in launches(text)] == found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("op", "length"), [("rms_norm", 256), ("layer_norm", 256), ("rms_norm", 262144)]
)
def test_a_pack_has_every_kernel_of_a_quantised_norm(monkeypatch, op, length, recipe, layout):
    taken = []

    def take(file, name, constants, arch):
        taken.append(Kernel(file, name, constants))
        return b""

    monkeypatch.setattr(compile, "cubin", take)
    quantizer = RECIPES[recipe].quantizer("input", layout)

    def f(x, gamma):
        beta = (gamma,) if op == "layer_norm" else ()
        return getattr(so, op)(x, gamma, *beta, quantizer=quantizer).detach()

    lowered(f, ((128, length), jnp.bfloat16), ((length,), jnp.bfloat16))
    options = (("scaling", recipe), ("layout", layout))
    request = Request(f"{op}_quantized", length, "bfloat16", options=options)
    assert taken
    assert {*taken} <= {*packing.kernels_of(request, "sm_90")}


def test_empty_array_launches_nothing():
    text = lowered(quantise("delayed", "both"), ((0, 256), jnp.float32))
    assert launches(text) == []


def test_kernels_can_be_switched_off():
    with so.use_kernels(""):
        text = lowered(quantise("block", "rows"), X)
    assert launches(text) == []
