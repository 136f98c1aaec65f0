"""`kernels.gemm` as it is, from layout to library call, on XLA:CPU and a stand-in cuBLASLt."""

import threading
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardops import config
from shardops.kernels import gemm as kernels
from tests.closeness import assert_close
from tests.kernels.contractions import CASES, Contraction
from tests.kernels.gemm_calls import DTYPES, EPILOGUES, Call

SIZES = dict(zip("bhksmnxyqd", (2, 3, 7, 5, 4, 6, 3, 8, 5, 2), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("contraction", "moved"), CASES)
def test_gemm_of_every_layout(
    core: ModuleType,
    rng: np.random.Generator,
    contraction: Contraction,
    moved: tuple[str, ...],
    dtype: str,
) -> None:
    call = Call(rng, contraction, SIZES, dtype)
    call.check()
    assert call.text().count("stablehlo.transpose") == len(moved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("n", [1, 9, 16])
@pytest.mark.parametrize("add", [False, True])
def test_gemm_epilogues(
    core: ModuleType, rng: np.random.Generator, dtype: str, epilogue: str, n: int, add: bool
) -> None:
    for text, batch in (("bsk,kn", ""), ("bsk,bkn", "b")):
        call = Call(
            rng,
            Contraction(text, batch),
            {**SIZES, "n": n},
            dtype,
            epilogue=epilogue,
            bias=None if epilogue == "none" else dtype,
            add=dtype if add else None,
        )
        call.check()
        gelu_asked = epilogue in ("gelu", "gelu_aux")
        fused = not (gelu_asked and (dtype == "float32" or (epilogue == "gelu_aux" and n % 8)))
        flag = int(gelu_asked and fused)
        assert f"gelu = {flag} : i64" in call.text()
        assert f"relu = {int(epilogue == 'relu')} : i64" in call.text()
        assert f"add = {int(add and fused)} : i64" in call.text()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_gemm_dtypes_of_results(
    core: ModuleType, rng: np.random.Generator, dtype: str, out: str, epilogue: str
) -> None:
    sizes = {"m": 5, "k": 33, "n": 8}
    for bias in DTYPES:
        Call(
            rng, Contraction("mk,kn"), sizes, dtype, epilogue=epilogue, bias=bias, add=out, out=out
        ).check()


def test_gemm_gelu_without_bias(core: ModuleType, rng: np.random.Generator) -> None:
    for epilogue in ("gelu", "gelu_aux"):
        Call(
            rng, Contraction("mk,kn"), {"m": 5, "k": 9, "n": 8}, "bfloat16", epilogue=epilogue
        ).check()


@pytest.mark.parametrize("refused", ["gelu", "all"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gemm_without_an_algorithm(
    core: ModuleType,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    epilogue: str,
    refused: str,
) -> None:
    monkeypatch.setenv("FAKE_CUBLASLT_REFUSES", refused)
    for dtype in ("bfloat16", "float32"):
        call = Call(
            rng,
            Contraction("bmk,bkn", "b"),
            {"b": 2, "m": 5, "k": 9, "n": 8},
            dtype,
            epilogue=epilogue,
            bias=dtype,
            add=dtype,
        )
        call.check()
        assert ("stablehlo.dot_general" in call.text()) == (refused == "all")
        assert "gelu = 1" not in call.text()


def test_gemm_names_the_algorithm_of_the_query(core: ModuleType, rng: np.random.Generator) -> None:
    call = Call(rng, Contraction("mk,kn"), {"m": 5, "k": 9, "n": 8}, "float32")
    refused = core.counters()["algorithms_refused"]
    launched = core.counters()["gemms_launched"]
    call.check()
    assert core.counters()["gemms_launched"] == launched + 1
    assert core.counters()["algorithms_refused"] == refused
    text = call.text()
    assert "algo_version = 130100" in text
    assert "workspace_bytes = 131072" in text  # the fake's favourite takes two 64 KiB
    assert "tensor<131328xui8>" in text


def test_gemm_accumulates_in_place(core: ModuleType, rng: np.random.Generator) -> None:
    call = Call(
        rng,
        Contraction("mk,kn"),
        {"m": 5, "k": 9, "n": 8},
        "bfloat16",
        add="float32",
        out="float32",
    )
    assert "output_operand_alias" in call.text()
    before = np.asarray(call.operands[3]).copy()
    call.check()
    np.testing.assert_array_equal(
        np.asarray(call.operands[3]), before
    )  # the caller's is not touched
    lhs, rhs, _, add = call.operands

    def many(add: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, sum_: call.function(lhs, rhs, None, sum_)[0], add)

    want = before + 5 * (call.want[0] - before)
    assert_close(jax.jit(many, donate_argnums=0)(add), want, reduced=45)


@pytest.mark.parametrize(
    ("precision", "default", "compute"),
    [
        (None, None, 68),
        (None, "tensorfloat32", 77),
        (None, "highest", 68),
        (jax.lax.Precision.DEFAULT, None, 77),
        (jax.lax.Precision.HIGH, "highest", 77),
        (jax.lax.Precision.HIGHEST, "default", 68),
        ((jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST), None, 68),
        ("tensorfloat32", None, 77),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, None, 77),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3, None, 68),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, None, 68),
    ],
)
def test_gemm_precision(
    core: ModuleType, rng: np.random.Generator, precision: Any, default: str | None, compute: int
) -> None:
    with jax.default_matmul_precision(default):
        sizes = {"m": 5, "k": 9, "n": 8}
        call = Call(rng, Contraction("mk,kn"), sizes, "float32", precision=precision)
        assert f"compute = {compute} : i64" in call.text()
        half = Call(rng, Contraction("mk,kn"), sizes, "float16", precision=precision)
        assert "compute = 68 : i64" in half.text()


@pytest.mark.parametrize(
    ("precision", "default", "compute"),
    [(None, None, 77), (None, "highest", 68), (jax.lax.Precision.HIGHEST, "default", 68)],
)
def test_gemm_of_two_dtypes(
    core: ModuleType, rng: np.random.Generator, precision: Any, default: str | None, compute: int
) -> None:
    """A gradient's: of float16 and of a cotangent in float32."""
    sizes = {"m": 5, "k": 9, "n": 8}
    with jax.default_matmul_precision(default):
        call = Call(rng, Contraction("mk,kn"), sizes, "float16", precision=precision)
        call.operands[0] = call.operands[0].astype(np.float32)
        call.check()
        assert f"compute = {compute} : i64" in call.text()


def test_gemm_leaves_a_margin_of_multiprocessors(
    core: ModuleType, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardops.kernels.target import target_for, use_target

    monkeypatch.setenv("SHARDOPS_SM_MARGIN", "8")
    config.get.cache_clear()
    try:
        with use_target(target_for("sm_90", 124)):
            text = Call(rng, Contraction("mk,kn"), {"m": 5, "k": 9, "n": 8}, "float32").text()
    finally:
        config.get.cache_clear()
    assert "sm_count = 124 : i64" in text


def test_gemm_from_many_threads(core: ModuleType, rng: np.random.Generator) -> None:
    call = Call(
        rng,
        Contraction("mk,kn"),
        {"m": 16, "k": 9, "n": 8},
        "float32",
        epilogue="bias",
        bias="float32",
    )
    lhs, rhs, bias, _ = call.operands
    wrong = []

    def work(shift: float) -> None:
        for _ in range(20):
            got = np.asarray(call.function(lhs, rhs, bias + shift, None)[0])
            wrong.append(np.abs(got - call.want[0] - shift).max() > 1e-3)

    threads = [threading.Thread(target=work, args=(100.0 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 160
    assert not any(wrong)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gemm_under_shard_map(core: ModuleType, rng: np.random.Generator, check_vma: bool) -> None:
    """As the op lowers: an unfused epilogue mixes results of calls with sharded operands."""
    from shardops.primitives.local import local_primitive

    bind = local_primitive("gemm_under_test", _gelu_gemm, _gelu_gemm)
    mesh = jax.make_mesh((8,), ("x",))
    sizes = {"m": 16, "k": 9, "n": 8}
    call = Call(rng, Contraction("mk,kn"), sizes, "float32", epilogue="gelu_aux", bias="float32")

    def body(lhs: jax.Array, rhs: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        if check_vma:
            rhs, bias = (jax.lax.pcast(a, "x", to="varying") for a in (rhs, bias))
        return bind(lhs, rhs, bias, kernel=True)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), check_vma=check_vma
    )
    specs = (P("x"), P(), P())
    placed = [
        jax.device_put(a, jax.NamedSharding(mesh, spec))
        for a, spec in zip(call.operands[:3], specs, strict=True)
    ]
    got = jax.jit(mapped)(*placed)
    for value, want in zip(got, call.want, strict=True):
        assert_close(value, want, reduced=9)


def _gelu_gemm(lhs: jax.Array, rhs: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
    return kernels.gemm(
        lhs,
        rhs,
        bias,
        None,
        contracting=((1,), (0,)),
        batch=((), ()),
        epilogue="gelu_aux",
        out_dtype="float32",
        precision=None,
    )


def test_gemm_lowers_for_cuda_without_a_device(
    core: ModuleType, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_query_device", lambda: None)
    call = Call(rng, Contraction("mk,kn"), {"m": 5, "k": 9, "n": 8}, "bfloat16", epilogue="gelu")
    traced = call.function.trace(*call.operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@shardops_gemm" in text
    assert "algo_version" not in text
    assert f"workspace_bytes = {32 << 20}" in text


def test_gemm_is_exported(core: ModuleType, rng: np.random.Generator) -> None:
    pytest.importorskip("flatbuffers", reason="serialising needs flatbuffers")
    call = Call(rng, Contraction("mk,kn"), {"m": 5, "k": 9, "n": 8}, "float32")
    allowed = [jax.export.DisabledSafetyCheck.custom_call("shardops_gemm")]
    exported = jax.export.export(call.function, disabled_checks=allowed)(*call.operands)
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(*call.operands)[0], call.want[0], reduced=9)
