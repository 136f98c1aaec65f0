"""Runs the cells of the matrix: each op beside plain jnp under the same transformation."""

import functools
import warnings
from typing import Any

import jax
import numpy as np
import pytest

from tests.transforms.limits import limit
from tests.transforms.routes import ROUTES, Route
from tests.transforms.subjects import SUBJECTS
from tests.transforms.transformations import TRANSFORMATIONS, Transformation

# Relative to the largest value; float32 through a gradient or two of rows of 16 and up to 32 rows.
TOLERANCE = 1e-4


def cells(*routes: str) -> list[Any]:
    """Parameters of a test over all cells of some routes."""
    return [
        pytest.param(route, transformation, id=f"{route.name}-{transformation.name}")
        for route in ROUTES
        if route.name in routes
        for transformation in TRANSFORMATIONS
    ]


def check(route: Route, transformation: Transformation) -> None:
    """All ops in one program where the transformation allows it; values on every device."""
    noes = {s.name: limit(s, route, transformation) for s in SUBJECTS}
    functions, operands = {}, {}
    with route.entered() as mesh:
        for s in SUBJECTS:
            no = noes[s.name]
            if no and no.error is None:
                continue
            function = transformation.apply(route.function(s), route.nested(s))
            placed = route.placed(mesh, s)
            if no and no.error:
                called = jax.jit(function) if transformation.traced else function
                with pytest.raises(no.error, match=no.match):
                    called(*placed)
            else:
                functions[s.name], operands[s.name] = function, placed
        got = _run(functions, operands, traced=transformation.traced) if functions else {}
    wanted = _wanted(transformation) if functions else {}
    for name in functions:
        _compare(got[name], wanted[name], f"{name}, {route.name}, {transformation.name}")


def _run(functions: dict[str, Any], operands: dict[str, Any], *, traced: bool) -> dict[str, Any]:
    if traced:
        step = jax.jit(lambda of: {name: f(*of[name]) for name, f in functions.items()})
        return step(operands)
    with warnings.catch_warnings():
        # A donated buffer may not be usable; that is no fault.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return {name: f(*operands[name]) for name, f in functions.items()}


@functools.cache
def _wanted(transformation: Transformation) -> dict[str, Any]:
    functions, operands = {}, {}
    for s in SUBJECTS:
        functions[s.name] = transformation.apply(s.plain, s.plain)
        operands[s.name] = [jax.numpy.asarray(a) for a in s.operands()]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _run(functions, operands, traced=transformation.traced)


def _compare(got: Any, want: Any, what: str) -> None:
    gots, wants = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(gots) == len(wants), f"{what}: {len(gots)} results, wanted {len(wants)}"
    for n, (one, other) in enumerate(zip(gots, wants, strict=True)):
        other = np.asarray(other)
        assert one.shape == other.shape, f"{what}: result {n} is {one.shape}, not {other.shape}"
        limit = TOLERANCE * np.abs(other).max(initial=1e-3)
        shards = [(s.data, s.index) for s in getattr(one, "addressable_shards", ())]
        for data, index in shards or [(one, ...)]:
            worst = np.abs(np.asarray(data) - other[index]).max(initial=0)
            assert worst <= limit, f"{what}: result {n} is off by {worst:.3g}, limit {limit:.3g}"
