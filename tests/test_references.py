"""The oracles' derivatives against differences of their values."""

import numpy as np
import pytest

from tests import references as ref

STEP = 1e-6


def _difference(f, arrays, index, cotangent):
    """d sum(f * cotangent) / d arrays[index], by central differences."""
    out = np.zeros_like(arrays[index])
    for at in np.ndindex(out.shape):
        sides = []
        for sign in (1, -1):
            moved = [a.copy() for a in arrays]
            moved[index][at] += sign * STEP
            sides.append(float((f(*moved) * cotangent).sum()))
        out[at] = (sides[0] - sides[1]) / (2 * STEP)
    return out


@pytest.mark.parametrize("activation", [None, "gelu", "silu", "relu"])
def test_gemm_vjp_reference(rng, activation):
    dims = ((0, 2), (2, 0))
    arrays = [rng.standard_normal(s) for s in ((3, 2, 4), (4, 2, 3), (2,), (2, 2))]
    cotangent = rng.standard_normal((2, 2))

    def f(lhs, rhs, bias, add):
        return ref.gemm_reference(lhs, rhs, dims, bias, activation, add)

    lhs, rhs, bias, add = arrays
    got = ref.gemm_vjp_reference(cotangent, lhs, rhs, dims, bias, activation, add)
    for index, name in enumerate(("lhs", "rhs", "bias", "add")):
        want = _difference(f, arrays, index, cotangent)
        np.testing.assert_allclose(getattr(got, name), want, rtol=1e-6, atol=1e-7, err_msg=name)


def test_dot_general_reference_orders_dims(rng):
    lhs, rhs = rng.standard_normal((2, 5, 4, 7)), rng.standard_normal((2, 6, 4, 7))
    got = ref.dot_general_reference(lhs, rhs, (((3,), (3,)), ((0, 2), (0, 2))))
    np.testing.assert_allclose(got, np.einsum("bqhd,bkhd->bhqk", lhs, rhs))


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("op", ["layer", "rms"])
def test_norm_vjp_reference(rng, op, zero_centered_gamma):
    x, gamma, beta = (rng.standard_normal(s) for s in ((2, 3, 5), (5,), (5,)))
    dy, dh = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 3, 5))
    options = {"epsilon": 0.1, "zero_centered_gamma": zero_centered_gamma}
    norm, vjp = {
        "layer": (ref.layer_norm_reference, ref.layer_norm_vjp_reference),
        "rms": (ref.rms_norm_reference, ref.rms_norm_vjp_reference),
    }[op]

    def f(x, gamma, beta):
        out = norm(x, gamma, *([beta] if op == "layer" else []), **options)
        return out.y + x * dh / dy  # so that `* dy` also sums h's own cotangent

    got = vjp(dy, x, gamma, dh=dh, **options)
    names = ("x", "gamma", "beta") if op == "layer" else ("x", "gamma")
    for index, name in enumerate(names):
        want = _difference(f, [x, gamma, beta], index, dy)
        np.testing.assert_allclose(getattr(got, name), want, rtol=1e-6, atol=1e-7, err_msg=name)


def test_norm_reference_known_values():
    x = np.array([[3.0, 4.0]])
    got = ref.rms_norm_reference(x, np.ones(2), epsilon=0.0).y
    np.testing.assert_allclose(got, [[3 / 12.5**0.5, 4 / 12.5**0.5]])
    got = ref.layer_norm_reference(x, np.ones(2), np.array([0.0, 1.0]), epsilon=0.0).y
    np.testing.assert_allclose(got, [[-1, 2]])
