"""What drawn products move: exactly what their plan says, and no more than plain JAX moves, but for
the slack of plans that save collectives.

Forward, with a wanted result sharding, in float32: on a CPU XLA widens the collectives of others.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from shardops.recording import recording
from shardops.rules.gemm_search import SLACK
from tests import received
from tests.fuzz.amount import BYTE_CASES
from tests.fuzz.products import Product, products
from tests.fuzz.running import simplest
from tests.fuzz.settings import Setting, put, settings, to_p


def wrong(setting: Setting, case: Product) -> str:
    """What is wrong with the bytes of a case; an empty string where nothing is."""
    mesh = setting.mesh()
    out = NamedSharding(mesh, to_p(dict(case.specs)["out"]))
    with jax.set_mesh(mesh):
        arrays = [put(setting, mesh, jax.numpy.ones(s), case.spec(n)) for n, s in _operands(case)]
        told = {} if setting.explicit else {"out_shardings": out}

        def f(lhs: jax.Array, rhs: jax.Array) -> Any:
            return case.call(setting, mesh, {"lhs": lhs, "rhs": rhs})

        with recording() as records:
            compiled = jax.jit(f, **told).lower(*arrays).compile()
    # Auto axes are offered layouts more than once.
    moved, planned = received.received(compiled), records[-1].placement.plan.bytes
    plain = _plain(setting, case, out.spec, moved / (1 + SLACK))
    said = []
    if moved != pytest.approx(planned):
        said.append(f"moves {moved:g} bytes; its plan says {planned:g}")
    if moved > plain * (1 + SLACK) + 1e-6:
        said.append(f"moves {moved:g} bytes, plain JAX {plain:g}")
    return "; ".join(said)


def _operands(case: Product) -> list[tuple[str, tuple[int, ...]]]:
    return [("lhs", case.lhs), ("rhs", case.rhs)]


def _plain(setting: Setting, case: Product, out: jax.P, least: float) -> float:
    """Bytes of lax.dot_general on Auto axes, an all-reduce that is sliced as a reduce-scatter.

    Infinite where these are fewer than `least` and its value is wrong: XLA leaves sums out where an
    axis is on different contracting dims of the operands and another one on the same.
    """
    auto = dataclasses.replace(setting, explicit=(), route="auto")
    mesh = auto.mesh()

    def f(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(lhs, rhs, (case.contracting, case.batch))

    with jax.set_mesh(mesh):
        arrays = [put(auto, mesh, jax.numpy.ones(s), case.spec(n)) for n, s in _operands(case)]
        jitted = jax.jit(f, out_shardings=NamedSharding(mesh, out))
        moved = received.received_at_best(jitted.lower(*arrays).compile())
        if moved >= least:
            return moved
        rng = np.random.default_rng(0)
        whole = [rng.integers(-9, 9, s).astype(np.float32) for _, s in _operands(case)]
        names = [n for n, _ in _operands(case)]
        placed = [put(auto, mesh, a, case.spec(n)) for a, n in zip(whole, names, strict=True)]
        right = np.array_equal(np.asarray(jitted(*placed)), np.asarray(f(*whole)))
        return moved if right else math.inf


@pytest.mark.parametrize("route", ["explicit", "auto"])
@hypothesis_settings(
    max_examples=BYTE_CASES,
    phases=[Phase.generate],
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_product_moves_what_its_plan_says(route, data):
    setting = data.draw(settings([route]).map(lambda s: dataclasses.replace(s, even=True)))
    case = data.draw(products(setting, dtypes=("float32",)))
    case = dataclasses.replace(case, bias=False, add=False, activation=None, wanted="spec")
    if wrong(setting, case):
        case, message = simplest(setting, case, wrong, keep=("wanted",))
        raise AssertionError(f"{message}\nsetting = {setting!r}\ncase = {case!r}")
