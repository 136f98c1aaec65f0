"""Einsums, sizes and specs in words, and what is refused."""

import pytest

from shardops.explaining import equation
from tests.explain.one_product import planned


def test_dims_are_words_where_a_space_separates_them_else_letters():
    assert equation.parse("batch k, k n -> batch n").lhs == ("batch", "k")
    assert equation.parse("bsk,kn->bsn") == equation.parse("b s k, k n -> b s n")


def test_dims_of_both_operands_and_the_result_are_batch_dims():
    parsed = equation.parse("q b h e, k b h e -> b h q k")
    assert (parsed.batch, parsed.contracting) == (("b", "h"), ("e",))
    assert parsed.computed == ("b", "h", "q", "k")


def test_entries_hold_several_axes():
    mesh = {"dp": 2, "fsdp": 2, "tp": 2}
    got = equation.spec_of("--lhs", "dp+fsdp, ,tp", ("b", "s", "k"), mesh)
    assert got == (("dp", "fsdp"), (), ("tp",))
    assert equation.spec_of("--lhs", "", ("b", "s"), mesh) == ((), ())


def test_a_transposed_result_is_planned_as_the_product_gives_it():
    entry = planned("m k, k n -> n m", ",", ",tp", "tp,dp")
    assert entry.results[0].array.dims == ("m", "n")
    assert entry.results[0].spec == (("dp",), ("tp",))


def test_element_sizes_count():
    one, two = (planned("m k, k n -> m n", ",tp", "tp,", dtype=d) for d in ("bfloat16", "float32"))
    assert two.bytes == 2 * one.bytes > 0


def test_batch_like_dims_keep_a_contested_axis():
    sizes = {"m": 64, "n": 65536}
    plain = planned("m k, k n -> m n", "dp,", ",dp", sizes=sizes)
    like = planned("m k, k n -> m n", "dp,", ",dp", sizes=sizes, batch_like=["m"])
    assert plain.results[0].spec == ((), ("dp",))
    assert like.results[0].spec == (("dp",), ())


@pytest.mark.parametrize(
    "text, says",
    [
        ("b s k", "expected 'dims, dims -> dims'"),
        ("b k, k n, n q -> b q", "expected 'dims, dims -> dims'"),
        ("b k, k n", "expected 'dims, dims -> dims'"),
        ("b b k, k n -> b n", "Dim 'b' is twice in lhs"),
        ("b k, k k n -> b n", "Dim 'k' is twice in rhs"),
        ("b k, k n -> b q", "Dim 'q' of out is in neither lhs nor rhs"),
        ("b k, q n -> b n", "Dim 'k' is in lhs only"),
        ("b k, k n q -> b n", "Dim 'q' is in rhs only"),
        ("b k., k. n -> b n", "Dim 'k.' of lhs is no name"),
    ],
)
def test_a_malformed_einsum_is_refused(text, says):
    with pytest.raises(ValueError, match=r"^explain: the einsum is ") as error:
        equation.parse(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"lhs": "dp,,ep"}, "--lhs is 'dp,,ep'; expected axes of the mesh dp, tp. 'ep' on dim k"),
        (
            {"rhs": "tp,tp"},
            "--rhs is 'tp,tp'; expected each mesh axis once. 'tp' is on dim k and on dim n",
        ),
        ({"rhs": "tp+tp,"}, "'tp' is on dim k and on dim k"),
        ({"lhs": "dp,"}, "--lhs is 'dp,', 2 entries; expected 3, one for each of b s k"),
        ({"rhs": "tp,,"}, "--rhs is 'tp,,', 3 entries; expected 2, one for each of k n"),
        ({"out": "dp"}, "--out is 'dp', 1 entry; expected 3, one for each of b s n"),
        ({"out": "xp,,"}, "'xp' on dim b"),
        ({"out": "tp,,", "sizes": {"b": 6}}, "Dim b of out has 6 elements for 4 devices"),
        ({"dtype": "int8"}, "--dtype is 'int8'; expected float32 | bfloat16 | float16"),
        ({"batch_like": ["z"]}, "--batch-dims is 'z'; expected dims of b s k or k n"),
    ],
)
def test_bad_specs_are_refused(changed, says):
    given = {"lhs": "dp,,tp", "rhs": "tp,", "out": None, **changed}
    with pytest.raises(ValueError, match=r"^explain: ") as error:
        planned("b s k, k n -> b s n", **given)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("b=8,s", "'s' is none"),
        ("b=8,=3", "'=3' is none"),
        ("b=0", "'b=0' is none"),
        ("b=x", "'b=x' is none"),
        ("k=8,b=2,k=4", "'k' is given 8 and 4"),
    ],
)
def test_bad_sizes_are_refused(text, says):
    with pytest.raises(ValueError, match=r"^explain: --shape is ") as error:
        equation.sizes_of("--shape", text)
    assert says in str(error.value)


def test_sizes_have_to_be_those_of_the_dims():
    parsed = equation.parse("m k, k n -> m n")
    specs = (",", ",", None)
    with pytest.raises(ValueError, match=r"--shape is without 'k'; .* Add k=<size>, which lhs has"):
        equation.record_of(parsed, {"m": 8, "n": 8}, {"dp": 2}, specs)
    with pytest.raises(ValueError, match=r"--shape is with 'z'; .* Drop 'z'"):
        equation.record_of(parsed, {"m": 8, "k": 8, "n": 8, "z": 8}, {"dp": 2}, specs)


@pytest.mark.parametrize("number", ["9" * 20, "9" * 5000])
def test_sizes_that_no_memory_holds_are_refused(number):
    with pytest.raises(
        ValueError, match=r"--shape is .*; expected sizes of at most 2\^40"
    ) as error:
        equation.sizes_of("--shape", f"m=8,n={number}")
    assert len(str(error.value)) < 800
    assert equation.sizes_of("--shape", f"n={2**40}") == {"n": 2**40}
