"""Norms in layouts that neighbouring libraries were reported, or read, to fail on.

Values on every device against float64, and what moves.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import cases, meshes, references
from tests.closeness import assert_shards_close

both_norms = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])


# --- a norm whose rows are sharded, and cotangents that lie otherwise -----------------------------


@both_norms
@pytest.mark.parametrize("stats", ["auto", "distributed", "gather"])
@pytest.mark.parametrize("cotangent", [(), ("dp",), ("dp", "tp"), (None, "dp")])
def test_norm_of_sharded_rows_whatever_the_cotangents_layout(rng, op, stats, cotangent):
    sizes = {"dp": 2, "tp": 2}
    x, gamma, dy = (cases.random(rng, s) for s in ((8, 32), (32,), (8, 32)))
    want = getattr(references, f"{op}_reference")(x, gamma)
    wanted = getattr(references, f"{op}_vjp_reference")(dy, x, gamma)
    for kind in ("auto", "explicit"):
        with meshes.entered(kind, sizes) as mesh:
            placed = meshes.place(mesh, x, "dp", "tp"), meshes.place(mesh, gamma)
            there = meshes.place(mesh, dy, *cotangent)

            @jax.jit
            def step(x, gamma, dy):
                y, pull = jax.vjp(functools.partial(getattr(so, op), stats=stats), x, gamma)
                if jax.typeof(y).sharding.mesh.explicit_axes:
                    dy = jax.sharding.reshard(dy, jax.typeof(y).sharding)
                return y, *pull(dy)

            y, dx, dgamma = step(*placed, there)
            if kind == "explicit":
                assert meshes.same(dx.sharding.spec, P("dp", "tp"))
        assert_shards_close(y, want.y, reduced=32, what="y")
        assert_shards_close(dx, wanted.x, reduced=32, what="dx")
        assert_shards_close(dgamma, wanted.gamma, reduced=40, what="dgamma")


# --- gradients of gamma and beta: a sum over the axes that shard rows, whatever they are called ---

NAMES = {"dp": 2, "fsdp": 2, "tp": 2}
OTHERS = {"rows": 2, "columns": 2, "stage": 2}

PARAMETER_LAYOUTS = {
    # A library that sums over its dp, fsdp and tp axes whatever x's layout is gets these wrong:
    "replicated-over-dp": (NAMES, ("fsdp", "tp")),  # x 2
    "replicated-over-dp-and-fsdp": (NAMES, (None, "tp")),  # x 4
    "replicated-over-all": (NAMES, ()),  # x 8
    "batch-over-an-axis-of-another-name": (OTHERS, ("rows",)),  # not summed
    "sequence-over-an-axis-of-another-name": (OTHERS, (None, "stage")),  # not summed
    # and these right:
    "all-three": (NAMES, (("dp", "fsdp"), "tp")),
    "tp-on-the-batch": (NAMES, ("tp", "dp")),
    "all-others": (OTHERS, (("stage", "rows"), "columns")),
}


@both_norms
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("layout", PARAMETER_LAYOUTS)
def test_norm_parameters_are_summed_over_the_axes_of_the_rows(rng, op, kind, layout):
    sizes, rows = PARAMETER_LAYOUTS[layout]
    x, gamma, dy = (cases.random(rng, s) for s in ((8, 4, 16), (16,), (8, 4, 16)))
    parameters = (gamma, gamma + 1) if op == "layer_norm" else (gamma,)
    wanted = getattr(references, f"{op}_vjp_reference")(dy, x, gamma)
    with meshes.entered(kind, sizes) as mesh:
        placed = meshes.place(mesh, x, *rows), meshes.place(mesh, dy, *rows)
        given = tuple(meshes.place(mesh, p) for p in parameters)

        def gradients(x, dy, *parameters):
            _, pull = jax.vjp(lambda *p: getattr(so, op)(x, *p), *parameters)
            return pull(dy)

        program = jax.jit(gradients).lower(*placed, *given).compile()
        got = program(*placed, *given)
    assert_shards_close(got[0], wanted.gamma, reduced=48, what="dgamma")
    if op == "layer_norm":
        assert_shards_close(got[1], wanted.beta, reduced=32, what="dbeta")
    groups = int(np.prod([sizes[a] for dim in rows for a in _axes(dim)]))
    found = {(c.kind, c.groups) for c in hlo.collectives(program)}
    assert found == ({("all-reduce", groups)} if groups > 1 else set())


def _axes(dim):
    return () if dim is None else (dim,) if isinstance(dim, str) else dim
