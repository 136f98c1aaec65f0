"""Products whose rows are unaligned: when they are padded, and that the values are the same."""

from types import ModuleType

import numpy as np
import pytest

from shardops.kernels import gemm_padding
from shardops.kernels.gemm_layout import layout
from shardops.kernels.gemm_padding import Padded, padded
from tests.kernels.contractions import Contraction
from tests.kernels.gemm_calls import EPILOGUES, Call

ODD = {"m": 11, "n": 13, "k": 9, "b": 3, "h": 5}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding saves more than it costs however small the product is."""
    monkeypatch.setattr(gemm_padding, "_ODD", 1.0)


def plan(text: str, m: int, n: int, k: int, itemsize: int = 2, out: int = 2) -> Padded | None:
    contraction = Contraction(text)
    shapes = contraction.shapes({"m": m, "n": n, "k": k})
    return padded(layout(*shapes, contraction.contracting, ((), ())), itemsize, out, 1)


@pytest.mark.parametrize(
    "text, sizes, want",
    [
        ("mk,kn", (4097, 4099, 4101), (4097, 4104, 4104)),
        ("km,kn", (4097, 4099, 4101), (4104, 4104, 4101)),
        ("mk,nk", (4097, 4099, 4101), (4097, 4104, 4104)),
        ("km,nk", (4097, 4099, 4101), (4104, 4104, 4104)),
        ("mk,kn", (4097, 4104, 4101), (4097, 4104, 4104)),
        ("mk,kn", (4097, 4104, 4104), None),  # its rows are aligned: m is nobody's row length
        ("mk,kn", (4096, 4100, 4096), (4096, 4104, 4096)),
        ("mk,kn", (1001, 1003, 1005), None),
        ("mk,kn", (3000, 3000, 3000), None),
        ("mk,kn", (63, 65, 67), None),  # takes longer to copy than to multiply
        ("mk,kn", (1, 4097, 4099), None),  # as does a matrix by a vector
        ("mk,kn", (4097, 1, 4099), None),
    ],
)
def test_padded_sizes(text, sizes, want) -> None:
    found = plan(text, *sizes)
    assert found == (None if want is None else Padded(*want))


def test_only_operands_of_16_bits_are_padded() -> None:
    assert plan("mk,kn", 4097, 4099, 4101, itemsize=4, out=4) is None


def test_rows_of_a_float32_result_are_aligned_sooner() -> None:
    assert plan("mk,nk", 4096, 4100, 4096, out=2) == Padded(4096, 4104, 4096)
    assert plan("mk,nk", 4096, 4100, 4096, out=4) is None


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("text", ["mk,kn", "km,kn", "mk,nk", "km,nk"])
def test_padded_values(
    core: ModuleType, always: None, rng: np.random.Generator, text: str, out: str, epilogue: str
) -> None:
    bias = None if epilogue == "none" else out
    call = Call(
        rng, Contraction(text), ODD, "bfloat16", epilogue=epilogue, bias=bias, add=out, out=out
    )
    call.check()
    assert "stablehlo.pad" in call.text()


@pytest.mark.parametrize(
    "text, batch", [("bmk,bkn", "b"), ("bmk,kn", ""), ("kbm,bkn", "b"), ("mhk,khn", "")]
)
def test_padded_values_of_more_dims(
    core: ModuleType, always: None, rng: np.random.Generator, text: str, batch: str
) -> None:
    Call(rng, Contraction(text, batch), ODD, "float16", epilogue="bias", bias="float16").check()
