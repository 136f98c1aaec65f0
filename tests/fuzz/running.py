"""Several cases in one program: values and gradients on every device, beside float64.

A case that is wrong is simplified for as long as it stays wrong, and shown.
"""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tests.closeness import tolerance
from tests.fuzz.settings import Setting, pinned, put


class Case(Protocol):
    """A drawn call of one op. `wanted_*`: (name, value, scale, reduced, roundings) of each."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def spec(self, name: str) -> Any: ...
    def arrays(self, rng: np.random.Generator) -> dict[str, Any]: ...
    def cotangents(self, rng: np.random.Generator, arrays: Any) -> tuple[Any, ...]: ...
    def call(self, setting: Setting, mesh: Any, arrays: Any) -> Any: ...
    def wanted_results(self, arrays: Any) -> list[tuple]: ...
    def wanted_gradients(self, arrays: Any, cotangents: Any) -> list[tuple]: ...


def check(setting: Setting, cases: Sequence[Case]) -> None:
    """Values and gradients of all cases; the simplest wrong one is in the message."""
    try:
        wrong = run(setting, cases)
    except Exception as error:  # of any case: each by itself then
        wrong = [_first_line(error)] * len(cases)
    for case, message in zip(cases, wrong, strict=True):
        if message and alone(setting, case):
            case, message = simplest(setting, case)
            raise AssertionError(f"{message}\nsetting = {setting!r}\ncase = {case!r}")
    assert not any(wrong), f"wrong together, right alone: {wrong}\n{setting!r}\n{cases!r}"


def alone(setting: Setting, case: Case) -> str:
    try:
        return run(setting, [case])[0]
    except Exception as error:
        return _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def run(setting: Setting, cases: Sequence[Case]) -> list[str]:
    """What is wrong with each case; an empty string where nothing is."""
    mesh = setting.mesh()
    seeds = [np.random.default_rng(zlib.crc32(repr(case).encode())) for case in cases]
    arrays = [case.arrays(rng) for case, rng in zip(cases, seeds, strict=True)]
    cotangents = [
        case.cotangents(rng, a) for case, rng, a in zip(cases, seeds, arrays, strict=True)
    ]

    def one(case: Case, arrays: Any, cotangents: Any) -> Any:
        floats = {n: a for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}

        def loss(floats: Any) -> Any:
            given = arrays | floats
            if setting.uneven:
                given = {n: pinned(mesh, a, case.spec(n)) for n, a in given.items()}
            out = case.call(setting, mesh, given)
            results = out if isinstance(out, tuple) else (out,)
            pairs = zip(results, cotangents, strict=True)
            total = sum(jnp.sum(r.astype(jnp.float32) * c.astype(jnp.float32)) for r, c in pairs)
            return total, results

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
        return results, gradients

    with jax.set_mesh(mesh):
        placed = [
            {n: put(setting, mesh, a, case.spec(n)) for n, a in given.items()}
            for case, given in zip(cases, arrays, strict=True)
        ]
        step = jax.jit(lambda *of: [one(*each) for each in zip(cases, *of, strict=True)])
        got = step(placed, cotangents)
    return [
        _compare(case, a, c, *g)
        for case, a, c, g in zip(cases, arrays, cotangents, got, strict=True)
    ]


def _compare(case: Case, arrays: Any, cotangents: Any, results: Any, gradients: Any) -> str:
    wanted = case.wanted_results(arrays)
    found = [_difference(got, *want) for got, want in zip(results, wanted, strict=True)]
    for name, *want in case.wanted_gradients(arrays, cotangents):
        found.append(_difference(gradients[name], f"gradient of {name}", *want))
    return "; ".join(f for f in found if f)


def _difference(
    got: jax.Array, what: str, want: np.ndarray, scale: float, reduced: int, roundings: int
) -> str:
    """On every device: replicas that differ would hide behind the first one."""
    if got.shape != want.shape:
        return f"{what}: shape {got.shape}, wanted {want.shape}"
    largest = max(float(np.abs(want).max(initial=0)), float(scale))
    limit = tolerance(got.dtype, reduced, roundings) * largest
    for shard in got.addressable_shards:
        values = np.asarray(shard.data).astype(np.float64)
        worst = float(np.abs(values - want[shard.index]).max(initial=0))
        if not worst <= limit:
            return f"{what}: error {worst:.3g} on {shard.device}, tolerance {limit:.3g}"
    return ""


# ---- simpler cases -------------------------------------------------------------------------------


def simplest(
    setting: Setting, case: Any, wrong: Any = alone, keep: Sequence[str] = ()
) -> tuple[Any, str]:
    """A case that is still wrong and cannot be made simpler by one step, and what is wrong.

    Fields in `keep` stay as they are.
    """
    message = wrong(setting, case)
    found = True
    while found:
        found = False
        for simpler in _simpler(case, keep):
            said = wrong(setting, simpler)
            if said:
                case, message, found = simpler, said, True
                break
    return case, message


def _simpler(case: Any, keep: Sequence[str]) -> Iterator[Any]:
    """Options left out one at a time, then axes of the drawn layouts."""
    for field in dataclasses.fields(case):
        if field.default is dataclasses.MISSING or field.name in keep:
            continue
        if getattr(case, field.name) != field.default:
            yield dataclasses.replace(case, **{field.name: field.default})
    specs = dict(case.specs)
    for name, spec in specs.items():
        for dim, axes in enumerate(spec):
            if axes:
                shorter = (*spec[:dim], axes[:-1], *spec[dim + 1 :])
                yield dataclasses.replace(case, specs=tuple({**specs, name: shorter}.items()))
