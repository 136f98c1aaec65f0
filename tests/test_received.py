"""The ring bytes and the FLOPs that are read from compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes, received

ROWS, COLS = 16, 32
WHOLE = 4 * ROWS * COLS


def on_devices(f, into, out):
    mesh = meshes.make("auto")
    x = jax.ShapeDtypeStruct((ROWS, COLS), jnp.float32)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=into, out_specs=out)).lower(x).compile()


TP = P(None, "tp")
CASES = {
    "all-gather": (
        lambda x: jax.lax.pcast(jax.lax.all_gather(x, "tp", axis=1, tiled=True), (), to="varying"),
        TP,
        P("tp"),
        WHOLE * 3 / 4,
    ),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True),
        TP,
        P("tp"),
        WHOLE / 4 * 3 / 4,
    ),
    "all-reduce": (lambda x: jax.lax.psum(x, "tp"), TP, P(), 2 * WHOLE / 4 * 3 / 4),
    "all-to-all": (
        lambda x: jax.lax.all_to_all(x, "tp", 0, 1, tiled=True),
        TP,
        P("tp"),
        WHOLE / 4 * 3 / 4,
    ),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]),
        TP,
        TP,
        WHOLE / 4,
    ),
    "nothing": (lambda x: 2 * x, TP, TP, 0),
}


@pytest.mark.parametrize("kind", CASES)
def test_ring_bytes_of_each_collective(kind):
    f, into, out, expected = CASES[kind]
    compiled = on_devices(f, into, out)
    assert (kind == "nothing") or kind in compiled.as_text()
    assert received.received(compiled) == received.received_at_best(compiled) == expected


def product(out, lhs, rhs):
    """By XLA's partitioner."""
    mesh = meshes.make("auto")
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((16, 64), lhs), ((64, 32), rhs))
    ]
    return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, out)).lower(*operands).compile()


@pytest.mark.parametrize(
    ("out", "share"),
    [
        pytest.param(P("tp"), 3 / 4, id="rows"),
        pytest.param(P(None, "tp"), 3 / 4, id="columns"),
        pytest.param(P(), 2 * 3 / 4, id="whole"),
    ],
)
def test_an_all_reduce_that_is_sliced_counts_as_a_reduce_scatter(out, share):
    """On the CPU the partial sums over tp are always all-reduced."""
    compiled = product(out, P(None, "tp"), P("tp"))
    assert received.received(compiled) == WHOLE * 2 * 3 / 4
    assert received.received_at_best(compiled) == WHOLE * share


SLICED = """HloModule sliced, num_partitions=8

ENTRY %main (x: f32[16,32]) -> (f32[4,32], f32[16,32]) {
  %x = f32[16,32] parameter(0)
  %at = s32[] constant(0)
  %sum = f32[16,32] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  %piece = f32[4,32] dynamic-slice(%sum, %at, %at), dynamic_slice_sizes={4,32}
  USE
}
"""


@pytest.mark.parametrize(
    ("use", "share"),
    [
        ("ROOT %out = f32[4,32] negate(%piece)", 3 / 4),
        ("ROOT %out = (f32[4,32], f32[16,32]) tuple(%piece, %sum)", 2 * 3 / 4),
        ("%other = f32[16,32] negate(%sum)", 2 * 3 / 4),
        ("ROOT %out = f32[16,32] copy(%sum)", 2 * 3 / 4),
    ],
)
def test_an_all_reduce_that_is_used_whole_as_well_counts_whole(use, share):
    assert received.received_at_best(SLICED.replace("USE", use)) == WHOLE * share


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        pytest.param(8, 1 / 2 + 2 / 2 * 1 / 2, id="scattered over two, summed over two"),
        pytest.param(2, 3 / 4, id="a slice of the piece"),
    ],
)
def test_a_slice_of_another_size(rows, share):
    text = SLICED.replace("[4,32]", f"[{rows},32]").replace("USE", "")
    assert received.received_at_best(text) == WHOLE * share


def test_flops_are_those_of_one_device():
    work = 2 * 16 * 64 * 32
    assert received.flops(product(P(), P(), P())) == work
    assert received.flops(product(P("dp", "tp"), P("dp"), P(None, "tp"))) == work / 8
