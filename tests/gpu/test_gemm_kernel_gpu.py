"""`kernels.gemm` on cuBLASLt itself, against float64."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardops.kernels import gemm as kernels
from shardops.kernels import library
from tests.closeness import assert_close
from tests.kernels.contractions import CASES, Contraction
from tests.kernels.gemm_calls import DTYPES, EPILOGUES, Call

TRANSPOSES = ("mk,kn", "km,kn", "mk,nk", "km,nk")
# Odd and even, long and short, in every place.
SIZES = [
    (1, 1, 1),
    (7, 1, 96),
    (1, 1000, 7),
    (96, 7, 1000),
    (1000, 96, 1),
    (1024, 1000, 96),
    (96, 1024, 4096),
    (4096, 96, 1024),
    (1000, 4096, 7),
]


def sizes_of(m: int, n: int, k: int) -> dict[str, int]:
    return {"m": m, "n": n, "k": k, "b": 3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("text", TRANSPOSES)
def test_gemm_sizes(
    rng: np.random.Generator, text: str, sizes: tuple[int, int, int], dtype: str
) -> None:
    Call(rng, Contraction(text), sizes_of(*sizes), dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 1, 96), (96, 1000, 7), (64, 96, 1000)])
@pytest.mark.parametrize("text", ["bmk,bkn", "mbk,bkn", "bkm,bnk", "kbm,nbk"])
def test_gemm_batches(
    rng: np.random.Generator, text: str, sizes: tuple[int, int, int], dtype: str
) -> None:
    Call(rng, Contraction(text, "b"), sizes_of(*sizes), dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contraction", [case for case, _ in CASES], ids=lambda case: case.text)
def test_gemm_layouts(rng: np.random.Generator, contraction: Contraction, dtype: str) -> None:
    sizes = dict(zip("bhksmnxyqd", (2, 3, 7, 5, 4, 6, 3, 8, 5, 2), strict=True))
    Call(rng, contraction, sizes, dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("sizes", [(7, 9, 96), (96, 1000, 7), (1, 8, 64), (1024, 96, 1000)])
@pytest.mark.parametrize("add", [False, True])
def test_gemm_epilogues(
    rng: np.random.Generator, epilogue: str, sizes: tuple[int, int, int], dtype: str, add: bool
) -> None:
    for text in ("mk,kn", "km,nk") if add else ("mk,nk", "km,kn"):
        Call(
            rng,
            Contraction(text),
            sizes_of(*sizes),
            dtype,
            epilogue=epilogue,
            bias=None if epilogue == "none" else dtype,
            add=dtype if add else None,
        ).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gemm_epilogues_of_batches(rng: np.random.Generator, epilogue: str, dtype: str) -> None:
    for n in (24, 25):
        Call(
            rng,
            Contraction("bmk,bkn", "b"),
            {"b": 3, "m": 33, "k": 17, "n": n},
            dtype,
            epilogue=epilogue,
            bias=None if epilogue == "none" else dtype,
        ).check()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_dtypes_of_results(
    rng: np.random.Generator, dtype: str, out: str, epilogue: str
) -> None:
    sizes = {"m": 96, "n": 72, "k": 100}
    Call(
        rng, Contraction("mk,kn"), sizes, dtype, epilogue=epilogue, bias=out, add=out, out=out
    ).check()


def test_gemm_is_exact_in_float32_and_not_in_tf32(rng: np.random.Generator) -> None:
    sizes = {"m": 256, "n": 256, "k": 256}
    Call(rng, Contraction("mk,kn"), sizes, "float32").check()
    asked = jax.lax.Precision.DEFAULT
    fast = Call(rng, Contraction("mk,kn"), sizes, "float32", precision=asked)
    with pytest.raises(AssertionError, match="relative error"):
        fast.check()
    # TensorFloat-32 has a mantissa of 10 bits, as float16 has.
    got = np.asarray(fast.function(*fast.operands)[0])
    assert_close(got, fast.want[0], dtype=np.float16, reduced=256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("biased", [False, True])
def test_gemm_is_one_fused_call(
    rng: np.random.Generator, epilogue: str, dtype: str, biased: bool
) -> None:
    """An epilogue that cuBLASLt refused would still give the right values."""
    call = Call(
        rng,
        Contraction("mk,kn"),
        {"m": 64, "n": 64, "k": 64},
        dtype,
        epilogue=epilogue,
        bias=dtype if biased else None,
        add=dtype,
    )
    refused = library.core().counters()["algorithms_refused"]
    call.check()
    text = call.text()
    assert text.count("@shardops_gemm") == 1
    assert f"gelu = {int(epilogue in ('gelu', 'gelu_aux'))} : i64" in text
    assert "algo_version" in text
    assert library.core().counters()["algorithms_refused"] == refused


def test_gemm_in_command_buffers(rng: np.random.Generator) -> None:
    """XLA captures a chain into a CUDA graph, whose replays launch nothing through the handler."""
    length = 8
    x, w, b = (
        jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)
        for scale, shape in ((1, (192, 320)), (0.05, (320, 320)), (1, (320,)))
    )

    @jax.jit
    def chain(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        dims = ((1,), (0,)), ((), ())
        for _ in range(length):
            (x,) = kernels.gemm(
                x,
                w,
                b,
                None,
                contracting=dims[0],
                batch=dims[1],
                epilogue="gelu",
                out_dtype=x.dtype,
                precision=None,
            )
        return x

    outs, launched = [], []
    for _ in range(20):
        before = library.core().counters()["gemms_launched"]
        outs.append(np.asarray(chain(x, w, b)))
        launched.append(library.core().counters()["gemms_launched"] - before)
    assert launched[-1] == 0, f"launches of each run: {launched}"
    assert launched[0] >= length
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    want = x.astype(jnp.float32)
    for _ in range(length):
        product = jnp.dot(want, w.astype(jnp.float32), precision="highest")
        rounded = jax.nn.gelu(product + b.astype(jnp.float32)).astype(jnp.bfloat16)
        want = rounded.astype(jnp.float32)
    assert_close(outs[0], want, reduced=320, roundings=2 * length)


def test_gemm_interleaved_from_threads(rng: np.random.Generator) -> None:
    sizes = {"m": 192, "n": 256, "k": 96}
    calls = [
        Call(rng, Contraction(text), sizes, dtype, epilogue="bias", bias=dtype)
        for text, dtype in (("mk,kn", "bfloat16"), ("km,nk", "float32"))
    ]
    checked: list[bool] = []

    def work() -> None:
        for _ in range(25):
            for call in calls:
                call.check()
                checked.append(True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(checked) == 200
