"""How errors show what was given, whatever it is."""

import jax
import numpy as np
import pytest

import shardops as so
from shardops.errors import shown, wrong
from shardops.kernels import target
from shardops.layers import arguments


class Silent:
    def __repr__(self):
        raise RuntimeError("no words")


class Wordy:
    def __repr__(self):
        return "Wordy(\n" + "  many,\n" * 5000 + ")"


LONG = {
    "an integer": (10**400, "an integer of 1329 bits"),
    "one that Python refuses to write": (-(10**5000), "an integer of 16610 bits"),
    "text": ("x" * 9000, "xxx… (900"),
    "a tuple": (tuple(range(9000)), "(0, 1, 2, "),
    "a tuple of such integers": ((10**5000,), "a tuple that has no repr"),
    "an object": (Wordy(), "Wordy( many, many, "),
    "an object without words": (Silent(), "a Silent that has no repr"),
}


@pytest.mark.parametrize("value, text", LONG.values(), ids=LONG)
def test_what_is_long_or_cannot_be_shown_is_short(value, text):
    for got in (shown(value), wrong("op", "x", value, "less", "Do.")):
        assert text in got
        assert len(got) < 280
        assert "\n" not in got
    assert len(shown(value)) <= 240
    assert shown(value) in wrong("op", "x", shown(value), "less", "Do.")


def plan(**changed):
    given = {"lhs_spec": None, "rhs_spec": None, "axis_sizes": {"d": 2}}
    so.rules.plan_gemm((8, 8), (8, 8), **given | changed, contracting_dims=((1,), (0,)))


@pytest.mark.parametrize("value", [0, -3, 1e-9, "gelu", (1, "tp"), None, 2**256 - 1])
def test_what_is_short_is_shown_as_it_is(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value, _", LONG.values(), ids=LONG)
def test_ops_and_plans_refuse_such_arguments_in_few_words(value, _):
    x = np.ones((4, 4), np.float32)
    calls = [
        lambda: so.softmax(x, scale=value),
        lambda: so.softmax(x, causal=value),
        lambda: so.rms_norm(x, x[0], epsilon=value),
        lambda: so.gemm(x, x, activation=value),
        lambda: so.gemm(x, x, contracting_dims=value),
        lambda: so.gemm(x, x, out_dtype=value),
        lambda: so.gemm(x, x, out_sharding=value),
        lambda: so.dot_general(x, x, value),
        lambda: so.dot_general(x, x, (((1,), (0,)), ((), ())), preferred_element_type=value),
        lambda: so.explain(lambda: x, link=value),
        lambda: plan(lhs_spec=((value,), None)),
        lambda: plan(axis_sizes={"d": (value,)}),
        lambda: arguments.dtypes("Dense", value),
        lambda: arguments.positive("Dense", "rope_theta", value, "Use 1e4."),
        lambda: arguments.rules([value]),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as refusal:
            call()
        assert len(str(refusal.value)) < 640
        assert "\n" not in str(refusal.value)


def test_names_in_specs_may_be_long():
    x = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match=r"out_sharding is .*xxx… .*Rename 'xxx.*…") as refusal:
        so.gemm(x, x, out_sharding=jax.P("x" * 9000))
    assert len(str(refusal.value)) < 900


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError("compares with nothing")

    def __hash__(self):
        return 0


X, GAMMA = np.ones((4, 8), np.float32), np.ones(8, np.float32)
STRANGE = {
    "bytes in the other order": (
        lambda: so.softmax(X.astype(">f4")), "softmax: x is of NumPy's dtype >f4; expected float32"
    ),
    "objects": (
        lambda: so.rms_norm(X, GAMMA.astype(object)), "rms_norm: gamma is of NumPy's dtype object"
    ),
    "masked": (
        lambda: so.layer_norm(X, GAMMA, GAMMA, add=np.ma.array(X)),
        "layer_norm: add is a masked array of NumPy's; .* Pass add.filled",
    ),
    "a masked mask": (
        lambda: so.softmax(X, mask=np.ma.array(X > 0)), "softmax: mask is a masked array of NumPy's"
    ),
    "no comparison": (
        lambda: so.softmax(X, causal=Incomparable()), "softmax: causal is <.*Incomparable"
    ),
    "no function": (lambda: so.explain(X), "explain: fn is array.*; expected a function"),
    "no name of a link": (lambda: so.explain(abs, link=["pcie5"]), r"link is \['pcie5'\]; exp"),
    "no flag": (lambda: so.explain(abs, compare="no"), "explain: compare is 'no'; expected True |"),
    "an architecture's name alone": (
        lambda: target.use_target("sm_90").__enter__(), "use_target: target is 'sm_90'; expected a"
    ),
    "no architecture": (lambda: target.target_for(None, 1), "target_for: arch is None; expected"),
    "no multiprocessor": (
        lambda: target.target_for("sm_90", 0), "target_for: sm_count is 0; expected an int of 1 to"
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, words", STRANGE.values(), ids=STRANGE)
def test_strange_arguments_are_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
