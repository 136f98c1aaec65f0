"""A Quantizer that no recipe made: refused by name where it cannot be used."""

import jax
import jax.numpy as jnp
import pytest

import shardops as so
from tests.primitives.refusals import refuses

Mode = so.ScalingMode
E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize("op", ["quantize", "rms_norm"])
@pytest.mark.parametrize(
    ("argument", "says", "made"),
    [
        ("mode", ("'x'", "MXFP8"), so.Quantizer("x", E4M3)),  # pyright: ignore
        ("mode", ("NONE", "MXFP8"), so.Quantizer(Mode.NONE, E4M3)),
        ("format", ("'e4m3'", E4M3), so.Quantizer(Mode.TENSOR_CURRENT, "e4m3")),
        ("layout", ("'cols'", "'columns'"), so.Quantizer(Mode.TENSOR_CURRENT, E4M3, "cols")),  # pyright: ignore
        ("block", ("None", "MXFP8"), so.Quantizer(Mode.MXFP8, E4M3)),
        ("block", ("(1, 32)", "CURRENT"), so.Quantizer(Mode.TENSOR_CURRENT, E4M3, block=(1, 32))),
        ("scale_inv", ("None",), so.Quantizer(Mode.TENSOR_DELAYED, E4M3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hand_made_quantizer_is_refused(op, argument, says, made):
    def call(x):
        return so.quantize(x, made) if op == "quantize" else so.rms_norm(x, x[0], quantizer=made)

    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    refuses(ValueError, call, x, op="Quantizer", argument=argument, says=says)
