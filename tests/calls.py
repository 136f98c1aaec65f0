"""How the tests call the ops: inputs of a case, value and gradients in one compiled program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardops as so
from tests import cases, references
from tests.closeness import assert_close

Arrays = Mapping[str, Any]


def value_and_gradients(
    f: Callable[..., Any], arrays: Arrays, cotangents: Sequence[Any]
) -> tuple[Any, dict[str, jax.Array]]:
    """f(**arrays), and the cotangent of each array for those of the results."""

    def loss(arrays, cotangents):
        out = f(**arrays)
        results = out if isinstance(out, tuple) else (out,)
        pairs = zip(results, cotangents, strict=True)
        total = sum(jnp.sum(r.astype(jnp.float32) * c.astype(jnp.float32)) for r, c in pairs)
        return total, out

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, out), gradients = step(dict(arrays), tuple(cotangents))
    return out, gradients


# --- gemm -------------------------------------------------------------------------------------


def gemm_arrays(case: cases.GemmCase, rng: np.random.Generator, dtype: str) -> Arrays:
    arrays = {
        "lhs": cases.random(rng, case.lhs, dtype),
        "rhs": cases.random(rng, case.rhs, dtype, max(case.reduced, 1) ** -0.5),
    }
    if case.bias:
        arrays["bias"] = cases.random(rng, case.rhs_free, dtype)
    if case.add:
        out = case.lhs_free + case.rhs_free
        arrays["add"] = cases.random(rng, out, case.out_dtype or dtype)
    return arrays


def gemm(case: cases.GemmCase, **more) -> Callable[..., jax.Array]:
    def f(**arrays):
        return so.gemm(
            **arrays,
            contracting_dims=case.contracting,
            activation=case.activation,
            out_dtype=case.out_dtype,
            **more,
        )

    return f


def gemm_wanted(case: cases.GemmCase, arrays: Arrays, cotangent):
    options = {"contracting": case.contracting, "activation": case.activation}
    value = references.gemm_reference(**arrays, **options)
    return value, references.gemm_vjp_reference(cotangent, **arrays, **options)


def check_gemm(case: cases.GemmCase, got, gradients, wanted, check=assert_close) -> None:
    """Roundings on the way to a value: the pre-activation and the result; to a gradient: the
    pre-activation, its slope times the cotangent, the result."""
    value, cotangents = wanted
    curved = case.activation is not None
    check(got, value, reduced=case.reduced, roundings=3 if curved else 1, what="value")
    reduced = {
        "lhs": int(np.prod(case.rhs_free)),
        "rhs": int(np.prod(case.lhs_free)),
        "bias": int(np.prod(case.lhs_free)),
        "add": 1,
    }
    assert set(gradients) <= set(reduced)
    for name, gradient in gradients.items():
        check(
            gradient,
            getattr(cotangents, name),
            reduced=reduced[name] + case.reduced,
            roundings=5 if curved else 2,
            what=f"gradient of {name}",
        )


# --- norms ------------------------------------------------------------------------------------


def norm_arrays(
    op: str, case: cases.NormCase, rng: np.random.Generator, dtype: str
) -> tuple[Arrays, tuple]:
    """The arrays of a case, and cotangents of its results."""
    length = case.shape[-1:]
    gamma_dtype = case.gamma_dtype or dtype
    arrays = {
        "x": cases.random(rng, case.shape, dtype),
        "gamma": cases.random(rng, length, gamma_dtype),
    }
    if case.beta and op == "layer_norm":
        arrays["beta"] = cases.random(rng, length, gamma_dtype)
    if case.add:
        arrays["add"] = cases.random(rng, case.shape, dtype)
    count = 2 if case.return_input else 1
    return arrays, tuple(cases.random(rng, case.shape, dtype) for _ in range(count))


def norm(op: str, case: cases.NormCase, **more) -> Callable[..., Any]:
    def f(**arrays):
        return getattr(so, op)(
            **arrays,
            return_input=case.return_input,
            epsilon=case.epsilon,
            zero_centered_gamma=case.zero_centered_gamma,
            **more,
        )

    return f


def norm_wanted(op: str, case: cases.NormCase, arrays: Arrays, cotangents: Sequence[Any]):
    options = {"epsilon": case.epsilon, "zero_centered_gamma": case.zero_centered_gamma}
    value = getattr(references, f"{op}_reference")(**arrays, **options)
    rest = {k: v for k, v in arrays.items() if k != "beta"}
    dh = cotangents[1] if len(cotangents) > 1 else None
    vjp = getattr(references, f"{op}_vjp_reference")
    return value, vjp(cotangents[0], **rest, dh=dh, **options)


def check_norm(case: cases.NormCase, got, gradients, wanted, check=assert_close) -> None:
    value, cotangents = wanted
    results = got if case.return_input else (got,)
    length = case.shape[-1]
    check(results[0], value.y, reduced=length, what="y")
    if case.return_input:
        check(results[1], value.h, reduced=1, what="h")
    for name, gradient in gradients.items():
        check(
            gradient,
            getattr(cotangents, "x" if name == "add" else name),
            reduced=length if name in ("x", "add") else case.rows + length,
            what=f"gradient of {name}",
        )
