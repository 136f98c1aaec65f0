"""What drawn products move: exactly what their plan says, and no more than plain JAX moves.

Forward, with a wanted result sharding, in float32: on a CPU XLA widens the collectives of others.
"""

import dataclasses
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from shardops.recording import recording
from tests import received
from tests.fuzz.amount import BYTE_CASES
from tests.fuzz.products import Product, products
from tests.fuzz.running import simplest
from tests.fuzz.settings import Setting, put, settings, to_p

OPERANDS_MOVE_BY_PLAN = False  # else the partitioner moves them, and plans do not count it


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
    plain = _plain(setting, case, out.spec)
    said = []
    if moved != pytest.approx(planned):
        said.append(f"moves {moved:g} bytes; its plan says {planned:g}")
    if moved > plain * (1 + 1e-9):
        said.append(f"moves {moved:g} bytes, plain JAX {plain:g}")
    return "; ".join(said)


def _operands(case: Product) -> list[tuple[str, tuple[int, ...]]]:
    return [("lhs", case.lhs), ("rhs", case.rhs)]


def _plain(setting: Setting, case: Product, out: jax.P) -> float:
    """Bytes of lax.dot_general on Auto axes, an all-reduce that is sliced as a reduce-scatter."""
    auto = dataclasses.replace(setting, explicit=(), route="auto")
    mesh = auto.mesh()

    def f(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(lhs, rhs, (case.contracting, case.batch))

    with jax.set_mesh(mesh):
        arrays = [put(auto, mesh, jax.numpy.ones(s), case.spec(n)) for n, s in _operands(case)]
        jitted = jax.jit(f, out_shardings=NamedSharding(mesh, out))
        return received.received_at_best(jitted.lower(*arrays).compile())


@pytest.mark.skipif(not OPERANDS_MOVE_BY_PLAN, reason="operands are moved by the partitioner")
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
