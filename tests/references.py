"""The ops and their derivatives in float64 numpy, from the formulas alone.

No JAX and nothing of the library: an error in the library cannot repeat itself here.
"""

import dataclasses
import math

import numpy as np

Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


def _f64(*arrays):
    return tuple(None if a is None else np.asarray(a).astype(np.float64) for a in arrays)


# --- products ---------------------------------------------------------------------------------


def _labels(lhs_ndim: int, rhs_ndim: int, numbers: DimensionNumbers):
    """einsum labels of lhs, rhs and result: batch dims, lhs free dims, rhs free dims."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    left = list(range(lhs_ndim))
    right = list(range(lhs_ndim, lhs_ndim + rhs_ndim))
    shared = tuple(lhs_contract) + tuple(lhs_batch)
    for i, j in zip(shared, tuple(rhs_contract) + tuple(rhs_batch), strict=True):
        right[j % rhs_ndim] = left[i % lhs_ndim]
    contracted = {left[i % lhs_ndim] for i in lhs_contract}
    batch = [left[i % lhs_ndim] for i in lhs_batch]
    out = batch + [a for a in left if a not in contracted and a not in batch]
    return left, right, out + [a for a in right if a not in left]


def dot_general_reference(lhs, rhs, numbers: DimensionNumbers):
    """out[batch, lhs free, rhs free] = sum over the contracting dims."""
    lhs, rhs = _f64(lhs, rhs)
    left, right, out = _labels(lhs.ndim, rhs.ndim, numbers)
    return np.einsum(lhs, left, rhs, right, out, optimize=True)


def dot_general_vjp_reference(cotangent, lhs, rhs, numbers: DimensionNumbers):
    """Cotangents of lhs and rhs."""
    cotangent, lhs, rhs = _f64(cotangent, lhs, rhs)
    left, right, out = _labels(lhs.ndim, rhs.ndim, numbers)
    return (
        np.einsum(cotangent, out, rhs, right, left, optimize=True),
        np.einsum(cotangent, out, lhs, left, right, optimize=True),
    )


_GELU = math.sqrt(2 / math.pi)


def activation_reference(z, activation: str | None):
    if activation == "gelu":
        return 0.5 * z * (1 + np.tanh(_GELU * (z + 0.044715 * z**3)))
    if activation == "silu":
        return z / (1 + np.exp(-z))
    return np.maximum(z, 0) if activation == "relu" else z


def activation_slope_reference(z, activation: str | None):
    if activation == "gelu":
        t = np.tanh(_GELU * (z + 0.044715 * z**3))
        return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _GELU * (1 + 3 * 0.044715 * z**2)
    if activation == "silu":
        s = 1 / (1 + np.exp(-z))
        return s * (1 + z * (1 - s))
    return (z > 0).astype(np.float64) if activation == "relu" else np.ones_like(z)


def _pre_activation(lhs, rhs, contracting, bias, add):
    z = dot_general_reference(lhs, rhs, (contracting, ((), ())))
    bias, add = _f64(bias, add)
    return z + (0 if add is None else add) + (0 if bias is None else bias)


def gemm_reference(lhs, rhs, contracting=((-1,), (0,)), bias=None, activation=None, add=None):
    """activation(lhs · rhs + add + bias), the bias over the free dims of rhs."""
    return activation_reference(_pre_activation(lhs, rhs, contracting, bias, add), activation)


@dataclasses.dataclass(frozen=True)
class GemmCotangents:
    lhs: np.ndarray
    rhs: np.ndarray
    bias: np.ndarray | None
    add: np.ndarray | None


def gemm_vjp_reference(
    cotangent, lhs, rhs, contracting=((-1,), (0,)), bias=None, activation=None, add=None
) -> GemmCotangents:
    (cotangent,) = _f64(cotangent)
    z = _pre_activation(lhs, rhs, contracting, bias, add)
    dz = cotangent * activation_slope_reference(z, activation)
    dlhs, drhs = dot_general_vjp_reference(dz, lhs, rhs, (contracting, ((), ())))
    lhs_free = tuple(range(np.ndim(lhs) - len(contracting[0])))
    return GemmCotangents(
        lhs=dlhs,
        rhs=drhs,
        bias=None if bias is None else dz.sum(axis=lhs_free),
        add=None if add is None else dz,
    )


# --- norms ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Norm:
    y: np.ndarray
    h: np.ndarray  # what is normalised: x + add, as rounded to the dtype of x


@dataclasses.dataclass(frozen=True)
class NormCotangents:
    x: np.ndarray  # that of add is the same
    gamma: np.ndarray
    beta: np.ndarray


def _summed(x, add):
    """x + add, in float32 and rounded to the dtype of x, as float64."""
    x = np.asarray(x)
    if add is None:
        return x.astype(np.float64)
    total = x.astype(np.float32) + np.asarray(add).astype(np.float32)
    return total.astype(x.dtype).astype(np.float64)


def _normalised(h, epsilon: float, centred: bool):
    """x-hat and 1/sigma over the last dim."""
    d = h - h.mean(-1, keepdims=True) if centred and h.shape[-1] else h
    rstd = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon)
    return d * rstd, rstd


def _norm(x, gamma, beta, add, epsilon, zero_centered_gamma, centred) -> Norm:
    h = _summed(x, add)
    gamma, beta = _f64(gamma, beta)
    hat, _ = _normalised(h, epsilon, centred)
    y = hat * (gamma + 1 if zero_centered_gamma else gamma)
    return Norm(y=y if beta is None else y + beta, h=h)


def _norm_vjp(dy, x, gamma, add, dh, epsilon, zero_centered_gamma, centred) -> NormCotangents:
    h = _summed(x, add)
    dy, gamma, dh = _f64(dy, gamma, dh)
    hat, rstd = _normalised(h, epsilon, centred)
    dhat = dy * (gamma + 1 if zero_centered_gamma else gamma)
    dx = dhat - hat * (dhat * hat).mean(-1, keepdims=True)
    if centred:
        dx = dx - dhat.mean(-1, keepdims=True)
    dx = dx * rstd
    rows = tuple(range(h.ndim - 1))
    return NormCotangents(
        x=dx if dh is None else dx + dh, gamma=(dy * hat).sum(rows), beta=dy.sum(rows)
    )


def layer_norm_reference(
    x, gamma, beta=None, *, add=None, epsilon=1e-6, zero_centered_gamma=False
) -> Norm:
    """(h - mean) / sqrt(var + epsilon) * gamma + beta, h = x + add."""
    return _norm(x, gamma, beta, add, epsilon, zero_centered_gamma, centred=True)


def layer_norm_vjp_reference(
    dy, x, gamma, *, add=None, dh=None, epsilon=1e-6, zero_centered_gamma=False
) -> NormCotangents:
    """dh: the cotangent of h where h is returned too."""
    return _norm_vjp(dy, x, gamma, add, dh, epsilon, zero_centered_gamma, centred=True)


def rms_norm_reference(x, gamma, *, add=None, epsilon=1e-6, zero_centered_gamma=False) -> Norm:
    """h / sqrt(mean(h^2) + epsilon) * gamma, h = x + add."""
    return _norm(x, gamma, None, add, epsilon, zero_centered_gamma, centred=False)


def rms_norm_vjp_reference(
    dy, x, gamma, *, add=None, dh=None, epsilon=1e-6, zero_centered_gamma=False
) -> NormCotangents:
    return _norm_vjp(dy, x, gamma, add, dh, epsilon, zero_centered_gamma, centred=False)
