"""Layouts, checked by reading the operands as they say. No device, no library."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardops.kernels.gemm_layout import Layout, Operand, layout
from tests.kernels.contractions import CASES, Contraction

SIZES = dict(zip("bhksmnxyqd", (2, 3, 7, 5, 4, 6, 3, 8, 5, 2), strict=True))


def matrices(array: np.ndarray, operand: Operand, rows: int, cols: int, batch: int) -> np.ndarray:
    """[batch, rows, cols] as cuBLASLt would read them."""
    if operand.permutation is not None:
        array = np.ascontiguousarray(array.transpose(operand.permutation))
    stored = (cols, rows) if operand.transposed else (rows, cols)
    reach = (batch - 1) * operand.stride + (stored[0] - 1) * operand.ld + stored[1]
    assert reach <= array.size, f"{operand} reads {reach} of {array.size} elements"
    assert operand.ld >= stored[1], f"{operand} has overlapping rows of {stored[1]}"
    step = array.itemsize
    read = np.lib.stride_tricks.as_strided(
        array, (batch, *stored), (operand.stride * step, operand.ld * step, step)
    )
    return read.swapaxes(1, 2) if operand.transposed else read


def check(contraction: Contraction, sizes: dict[str, int]) -> Layout:
    shapes = contraction.shapes(sizes)
    lhs, rhs = (np.arange(1.0, 1 + math.prod(s)).reshape(s) for s in shapes)
    found = layout(*shapes, contraction.contracting, contraction.batch_dims)
    a = matrices(lhs, found.lhs, found.m, found.k, found.batch)
    b = matrices(rhs, found.rhs, found.k, found.n, found.batch)
    np.testing.assert_array_equal((a @ b).reshape(found.result), contraction.product(lhs, rhs))
    return found


@pytest.mark.parametrize(("contraction", "moved"), CASES)
def test_layout_reads_what_is_there(contraction: Contraction, moved: tuple[str, ...]) -> None:
    found = check(contraction, SIZES)
    assert (found.lhs.permutation is not None) == ("lhs" in moved)
    assert (found.rhs.permutation is not None) == ("rhs" in moved)


@pytest.mark.parametrize("contraction", [case for case, _ in CASES])
@pytest.mark.parametrize("ones", ["b", "k", "m", "n", "bk", "mn", "sx", "hqd"])
def test_layout_with_dims_of_one(contraction: Contraction, ones: str) -> None:
    check(contraction, {**SIZES, **dict.fromkeys(ones, 1)})


@given(st.data())
def test_layout_of_any_contraction(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from("bkmn"), min_size=1, max_size=6))
    letters = dict(zip("abcdef", kinds, strict=False))
    sizes = {c: data.draw(st.sampled_from((1, 2, 3))) for c in letters}
    lhs = "".join(data.draw(st.permutations([c for c, kind in letters.items() if kind != "n"])))
    rhs = "".join(data.draw(st.permutations([c for c, kind in letters.items() if kind != "m"])))
    batch = "".join(data.draw(st.permutations([c for c, k in letters.items() if k == "b"])))
    check(Contraction(f"{lhs},{rhs}", batch), sizes)


def test_layout_of_a_dense_layer() -> None:
    sizes = {"b": 2, "s": 5, "k": 7, "n": 6}
    assert check(Contraction("bsk,kn"), sizes) == Layout(
        m=10,
        n=6,
        k=7,
        batch=1,
        lhs=Operand(False, 7, 0),
        rhs=Operand(False, 6, 0),
        result=(2, 5, 6),
    )
    assert check(Contraction("bsk,bsn"), sizes) == Layout(
        m=7, n=6, k=10, batch=1, lhs=Operand(True, 7, 0), rhs=Operand(False, 6, 0), result=(7, 6)
    )


def test_layout_of_an_interleaved_batch() -> None:
    found = check(Contraction("sbk,bkn", "b"), {"s": 5, "b": 2, "k": 7, "n": 6})
    assert found.lhs == Operand(False, ld=14, stride=7)
    assert found.rhs == Operand(False, ld=6, stride=42)


def test_layout_moves_the_smaller_operand() -> None:
    contraction = Contraction("sxy,yxn")  # either could be put in the other's order
    assert check(contraction, {"s": 9, "x": 2, "y": 3, "n": 2}).lhs.permutation is None
    found = check(contraction, {"s": 2, "x": 2, "y": 3, "n": 9})
    assert found.rhs.permutation is None
    assert found.lhs.permutation == (0, 2, 1) or found.lhs.permutation == (2, 1, 0)
