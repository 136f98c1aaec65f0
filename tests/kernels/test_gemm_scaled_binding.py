"""Products of ScaledArrays as they lower for a GPU, run on XLA:CPU and a stand-in cuBLASLt."""

import contextlib
import re
import threading
from functools import partial
from types import ModuleType

import jax
import numpy as np
import pytest
from jax import P

import shardops as so
from shardops.kernels import launch
from shardops.kernels.target import target_for, use_target
from tests import meshes
from tests.kernels import emulator
from tests.kernels.scaled_calls import (
    BLOCK,
    CURRENT,
    E5M2,
    LENGTH,
    MX,
    PAIRS,
    ScaledCall,
    attribute,
    holds_no_dequantised_array,
    runs_in_fp8,
)

OUTS = ("float32", "bfloat16", "float16")
SIZES = {"m": 36, "n": 144, "k": 640, "b": 3, "s": 12, "h": 256}
BLOCKS = [("k", "nk"), ("k", "k"), ("mk", "k")]


@pytest.fixture(autouse=True)
def _hopper():
    with use_target(target_for("sm_90", 132)):
        yield


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("out", OUTS)
def test_one_scale_a_tensor(core: ModuleType, rng, formats, out) -> None:
    call = ScaledCall(rng, "mk,nk", SIZES, CURRENT, formats, out=out)
    text = runs_in_fp8(call, formats)
    assert "fast_accum = 1 : i64" in text
    assert (attribute(text, "scale_a"), attribute(text, "scale_b")) == (1, 1)
    assert "stablehlo.transpose" not in text


def test_precise_accumulation(core: ModuleType, rng) -> None:
    text = ScaledCall(rng, "mk,nk", SIZES, CURRENT, precise=True).text()
    assert "fast_accum = 0 : i64" in text


def test_no_dequantised_array_in_the_program(core: ModuleType, rng) -> None:
    for mode, blocked in ((CURRENT, None), (BLOCK, ("k", "nk"))):
        text = ScaledCall(rng, "mk,nk", SIZES, mode, blocked=blocked).text()
        holds_no_dequantised_array(text, (36, 640), (144, 640))


@pytest.mark.parametrize("blocked", BLOCKS)
@pytest.mark.parametrize("formats", PAIRS)
def test_scales_of_128(core: ModuleType, rng, formats, blocked) -> None:
    """k = 640 is five blocks: 128 x 128 scales are padded to eight. m and n are ragged in 128."""
    call = ScaledCall(rng, "mk,nk", SIZES, BLOCK, formats, blocked=blocked)
    text = runs_in_fp8(call, formats)
    modes = [3 if len(side) == 2 else 2 for side in blocked]
    assert [attribute(text, "scale_a"), attribute(text, "scale_b")] == modes
    assert "fast_accum = 0 : i64" in text
    # Scales of rows are asked for in the library's order rather than transposed.
    assert "dense<[0, 1]> : tensor<2xindex>" in text
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("text, moved", [("mk,kn", 1), ("km,nk", 1), ("km,kn", 2), ("bsk,kn", 1)])
@pytest.mark.parametrize("mode", [CURRENT, BLOCK])
def test_operands_that_are_not_along_k_are_transposed_in_8_bits(
    core, rng, text, moved, mode
) -> None:
    blocked = ("k", "nk") if mode is BLOCK else None
    program = runs_in_fp8(ScaledCall(rng, text, SIZES, mode, blocked=blocked))
    transposes = [line for line in program.splitlines() if "stablehlo.transpose" in line]
    assert len([line for line in transposes if "f8E4M3FN" in line]) == moved


@pytest.mark.parametrize("mode", [CURRENT, BLOCK])
def test_several_contracted_dims(core, rng, mode) -> None:
    """The blocks lie along the last; order and place of the dims are free."""
    for text in ("msh,nsh", "mhs,nsh", "smh,hns"):
        runs_in_fp8(
            ScaledCall(rng, text, SIZES, mode, blocked=("h", "h") if mode is BLOCK else None)
        )


def test_batches_of_one_scale(core, rng) -> None:
    for text in ("bmk,bnk", "mbk,bkn"):
        program = runs_in_fp8(ScaledCall(rng, text, SIZES, CURRENT, batch="b"))
        assert attribute(program, "batch") == 3


@pytest.mark.parametrize("mode", [CURRENT, BLOCK])
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (7, 33, 65), (3, 16, 130), (130, 8, 200)])
def test_odd_sizes_are_padded(core, rng, mode, m, n, k) -> None:
    sizes = {"m": m, "n": n, "k": k}
    blocked = ("k", "nk") if mode is BLOCK else None
    for extra in ({}, {"bias": "bfloat16", "epilogue": "bias"}, {"add": "bfloat16"}):
        text = runs_in_fp8(ScaledCall(rng, "mk,nk", sizes, mode, blocked=blocked, **extra))
        assert attribute(text, "n") % 16 == attribute(text, "k") % 16 == 0
        assert attribute(text, "m") == (m if mode is CURRENT else -(-m // 4) * 4)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("bias", [None, *OUTS])
@pytest.mark.parametrize("epilogue", ["none", "gelu", "gelu_aux"])
def test_epilogues(core, rng, epilogue, bias, out) -> None:
    asked = "bias" if bias and epilogue == "none" else epilogue
    call = ScaledCall(rng, "mk,nk", SIZES, CURRENT, epilogue=asked, bias=bias, add=out, out=out)
    text = runs_in_fp8(call)
    takes = {"float32": "bfloat16"}.get(out, out)  # the bias that cuBLASLt has
    fused = bias in (None, takes) and not (asked.startswith("gelu") and out == "float32")
    assert attribute(text, "bias") == int(fused and bias is not None)
    assert attribute(text, "add") == int(fused)
    assert attribute(text, "gelu") == int(fused and asked.startswith("gelu"))
    assert ("output_operand_alias" in text) == fused


NOT_NATIVE = {
    "e5m2": ("mk,nk", CURRENT, None, (E5M2, E5M2), ""),
    "mxfp8": ("mk,nk", MX, None, PAIRS[1], ""),
    "mxfp8 batched": ("bmk,bkn", MX, None, PAIRS[0], "b"),
    "both 128 x 128": ("mk,nk", BLOCK, ("mk", "nk"), PAIRS[0], ""),
    "blocks along n": ("mk,nk", BLOCK, ("k", "n"), PAIRS[0], ""),
    "batched blocks": ("bmk,bnk", BLOCK, ("k", "k"), PAIRS[0], "b"),
    "partial blocks inside of k": ("msk,nsk", BLOCK, ("s", "s"), PAIRS[0], ""),
}


@pytest.mark.parametrize("case", NOT_NATIVE)
def test_what_has_no_fp8_product_is_exact_all_the_same(core, rng, case) -> None:
    text, mode, blocked, formats, batch = NOT_NATIVE[case]
    call = ScaledCall(rng, text, SIZES, mode, formats, blocked=blocked, batch=batch, out="float32")
    call.check()
    wide = 0 if mode is BLOCK else 14
    assert attribute(call.text(), "type") == wide


@pytest.mark.parametrize("mode", LENGTH | {CURRENT: None})
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_other_gpus_and_refusals(core, rng, monkeypatch, mode, arch) -> None:
    monkeypatch.setenv("FAKE_CUBLASLT_REFUSES", "fp8")
    call = ScaledCall(
        rng,
        "mk,nk",
        SIZES,
        mode,
        epilogue="gelu_aux",
        bias="bfloat16",
        add="bfloat16",
        out="bfloat16",
    )
    with use_target(target_for(arch, 108)):
        call.check()
        assert attribute(call.text(), "type") == (0 if mode is BLOCK else 14)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def launched_on_the_host(monkeypatch, built):
    """Launches run as the emulator has them."""
    if emulator.reason_missing:
        pytest.skip(emulator.reason_missing)

    def call(plan, arrays, results, scalars):
        def run(*operands):
            tiles = [np.full(r.shape, 0xAB, np.uint8) for r in results]
            codes = [np.asarray(operand).view(np.uint8) for operand in operands]
            emulator.run(plan, built, codes, tiles, scalars)
            return tuple(t.view(r.dtype) for t, r in zip(tiles, results, strict=True))

        return jax.pure_callback(run, tuple(results), *arrays)

    monkeypatch.setattr(launch, "call", call)
    monkeypatch.setenv("FAKE_CUBLASLT_SM", "100")
    with use_target(target_for("sm_100", 148)):
        yield


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("m, n, k", [(36, 144, 640), (128, 256, 128), (5, 33, 90)])
def test_mxfp8_on_sm_100(core, rng, launched_on_the_host, formats, m, n, k) -> None:
    """Never run on such a GPU: the stand-in reads scales as cuBLASLt's documentation says."""
    call = ScaledCall(rng, "mk,nk", {"m": m, "n": n, "k": k}, MX, formats)
    text = runs_in_fp8(call, formats)
    assert (attribute(text, "scale_a"), attribute(text, "scale_b")) == (4, 4)
    assert attribute(text, "k") % 32 == 0


@pytest.mark.parametrize("text", ["mk,kn", "km,nk", "bsk,kn", "smh,hns", "asmbh,anshb"])
def test_mxfp8_wherever_the_dims_lie(core, rng, launched_on_the_host, text) -> None:
    """Data are transposed where they are not along k; of scales one launch orders all."""
    sizes = {"m": 130, "n": 48, "k": 96, "b": 2, "s": 3, "h": 64, "a": 2}
    blocked = ("h", "h") if "h" in text else None
    program = runs_in_fp8(ScaledCall(rng, text, sizes, MX, blocked=blocked))
    transposes = [line for line in program.splitlines() if "stablehlo.transpose" in line]
    assert not [line for line in transposes if "f8E8M0" in line or "ui8" in line]


ROWS, COLUMNS = (so.recipes.MXFP8Scaling().quantizer("input", w) for w in ("rows", "columns"))


def quantised(x, w, gamma):
    return so.gemm(so.quantize(x, ROWS), so.quantize(w, COLUMNS))


def normalised(x, w, gamma):
    return so.gemm(so.rms_norm(x, gamma, quantizer=ROWS), so.quantize(w, COLUMNS))


def ragged(x, w, gamma):
    return so.gemm(so.quantize(x[:, :250, :-32], ROWS), so.quantize(w[:-32, :-48], COLUMNS))


def sliced(x, w, gamma):
    """As arrays that were loaded are too: arguments of a program."""
    part = jax.tree.map(lambda a: a[:1], so.quantize(x, ROWS))
    return so.gemm(part, so.quantize(w, COLUMNS))


def gathered(x, w, gamma):
    x, w = jax.sharding.reshard(x, P(None, "tp", None)), jax.sharding.reshard(w, P("tp", None))
    return so.gemm(so.quantize(x, ROWS), so.quantize(w, COLUMNS), out_sharding=P())


def differentiated(x, w, gamma):
    dense = partial(so.dense, quantizers=so.recipes.MXFP8Scaling().dense_quantizers())
    y, back = jax.vjp(dense, x, w)
    return back(y)


@pytest.mark.parametrize(
    "program", [quantised, normalised, ragged, sliced, gathered, differentiated]
)
def test_nothing_but_a_launch_a_product_moves_scales_of_mxfp8(core, monkeypatch, program) -> None:
    def call(plan, arrays, results, *_rest):
        issue = jax.ffi.ffi_call("shardops_launch", tuple(results))
        return tuple(issue(*arrays, name=plan.kernel.name))

    monkeypatch.setattr(launch, "call", call)
    monkeypatch.setenv("FAKE_CUBLASLT_SM", "100")
    shapes = ((2, 256, 512), (512, 384), (512,))
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    mesh = meshes.entered("explicit") if program is gathered else contextlib.nullcontext()
    with use_target(target_for("sm_100", 148)), mesh:
        lowered = jax.jit(program).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    products = 3 if program is differentiated else 1
    assert lowered.count('name = "scale_tiles"') == lowered.count("@shardops_gemm") == products
    moves = re.findall(r"stablehlo\.(?:transpose|pad).*(?:f8E8M0|ui8)", lowered)
    assert not moves
    if program is gathered:
        assert re.search(r"all_gather.*f8E8M0", lowered, re.DOTALL)


def test_each_thread_keeps_its_own_scales(core, rng, monkeypatch) -> None:
    """Addresses of scales are in the library's descriptors: one that is shared would mix them."""
    monkeypatch.setenv("FAKE_CUBLASLT_SLEEP_US", "500")
    call = ScaledCall(rng, "mk,nk", {"m": 16, "n": 16, "k": 32}, CURRENT, out="float32")
    x, sx, w, sw = call.operands
    compiled = call.function.lower(x, sx, w, sw).compile()  # the target is this thread's alone
    once = np.asarray(compiled(x, sx, w, sw)[0])
    scales = [sx * 2.0**power for power in range(8)]
    right = []

    def work(power: int) -> None:
        for _ in range(20):
            got = np.asarray(compiled(x, scales[power], w, sw)[0])
            right.append(np.array_equal(got, once * 2.0**power))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 160
