"""shardops.hlo on programs that were just compiled, and on texts as other backends print them."""

# ruff: noqa: E501  (an HLO instruction is one line)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardops import hlo

PERMUTE = "{{0,1},{1,0},{4,5},{5,4}}"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def _manual(mesh, body, out_specs, shape=(8, 32), dtype=jnp.float32):
    f = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False)
    return jax.jit(f).lower(jax.ShapeDtypeStruct(shape, dtype)).compile()


@pytest.mark.parametrize(
    "body, out_specs, kind, size, groups, shape",
    [
        (lambda x: jax.lax.psum(x, "tp"), P(), "all-reduce", 1024, 4, (8, 32)),
        (lambda x: jax.lax.psum(x, ("dp", "tp")), P(), "all-reduce", 1024, 8, (8, 32)),
        (lambda x: jax.lax.pmax(x, "dp"), P(), "all-reduce", 1024, 2, (8, 32)),
        (
            lambda x: jax.lax.psum_scatter(x, "dp", tiled=True),
            P("dp"),
            "reduce-scatter",
            512,
            2,
            (4, 32),
        ),
        (lambda x: jax.lax.all_gather(x, "tp", tiled=True), P(), "all-gather", 4096, 4, (32, 32)),
        (
            lambda x: jax.lax.ppermute(x, "tp", [(0, 1), (1, 0)]),
            P("tp"),
            "collective-permute",
            1024,
            2,
            (8, 32),
        ),
    ],
    ids=["psum", "psum-two-axes", "pmax", "psum_scatter", "all_gather", "ppermute"],
)
def test_collectives_of_a_compiled_program(mesh, body, out_specs, kind, size, groups, shape):
    (found,) = hlo.collectives(_manual(mesh, body, out_specs))
    assert (found.kind, found.bytes, found.groups) == (kind, size, groups)
    assert (found.dtype, found.shape, found.arrays) == ("f32", shape, 1)


def test_collectives_all_to_all_counts_once_and_all_its_bytes(mesh):
    compiled = _manual(
        mesh, lambda x: jax.lax.all_to_all(x, "tp", 0, 0, tiled=True), P("tp"), (8, 32)
    )
    assert hlo.summary(compiled) == {"all-to-all": (1, 1024)}


def test_collectives_combined_counts_once_and_all_its_bytes(mesh):
    compiled = _manual(mesh, lambda x: jax.lax.psum((x, x[:1] * 2), "tp"), P())
    (found,) = hlo.collectives(compiled)
    assert (found.bytes, found.arrays, found.shape) == (1024 + 128, 2, (8, 32))


def test_collectives_none_where_nothing_moves():
    compiled = jax.jit(lambda x: x @ x).lower(np.ones((8, 8), np.float32)).compile()
    assert hlo.collectives(compiled) == ()
    assert hlo.summary(compiled) == {}


def test_collectives_in_a_loop_body_count_once(mesh):
    def body(x):
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "tp") * 0.5, None), x, None, length=7)[0]

    assert hlo.summary(_manual(mesh, body, P())) == {"all-reduce": (1, 1024)}


def test_collectives_of_the_partitioner(mesh):
    def f(x, w):
        with jax.named_scope("shardops.gemm"):
            return jnp.einsum("bsk,kn->bsn", x, w)

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    x, w = jnp.ones((8, 16, 32)), jnp.ones((32, 64))
    row = jax.jit(f, in_shardings=(at("dp", None, "tp"), at("tp")), out_shardings=at("dp"))
    (reduced,) = hlo.collectives(row.lower(x, w).compile())
    assert (reduced.kind, reduced.bytes, reduced.groups) == ("all-reduce", 4 * 16 * 64 * 4, 4)
    assert hlo.asked_by(reduced) == "shardops.gemm"

    column = jax.jit(
        f, in_shardings=(at("dp", "tp"), at(None, "tp")), out_shardings=at("dp", None, "tp")
    )
    (gathered,) = hlo.collectives(column.lower(x, w).compile())
    assert (gathered.kind, gathered.bytes, gathered.groups) == ("all-gather", 4 * 16 * 32 * 4, 4)
    assert hlo.asked_by(gathered) == "shardops.gemm"  # though XLA keeps only the argument's name


def test_asked_by_tells_forward_from_gradient(mesh):
    def f(x, w):
        with jax.named_scope("shardops.gemm"):
            return jnp.sum(jnp.sin(x @ w))

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    step = jax.jit(jax.grad(f, 1), in_shardings=(at("dp"), at()), out_shardings=at())
    (found,) = hlo.collectives(step.lower(jnp.ones((8, 32)), jnp.ones((32, 64))).compile())
    assert hlo.asked_by(found) == "shardops.gemm.grad"


@pytest.mark.parametrize(
    "op_name, name",
    [
        ("jit(f)/shardops.rms_norm/shardops_rms/psum", "shardops.rms_norm"),
        ("jit(f)/jvp(shardops.gemm)/dot_general", "shardops.gemm"),
        ("jit(f)/transpose(jvp(shardops.gemm))/psum", "shardops.gemm.grad"),
        ("jit(f)/transpose(jvp())/shardops.layer_norm/psum", "shardops.layer_norm.grad"),
        ("jit(f)/shardops.gemm.grad/reduce_scatter", "shardops.gemm.grad"),
        ("jit(f)/shardops.dense/shardops.gemm/psum", "shardops.gemm"),
        ("jit(f)/bsk,kn->bsn/transpose", "transpose"),
        ("jit(f)/shard_map/psum", "psum"),
        ("", "unknown"),
    ],
)
def test_asked_by_reads_the_innermost_scope(op_name, name):
    one = hlo.Collective("all-reduce", 4, "f32", (1,), 2, op_name)
    assert hlo.asked_by(one) == name


HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"
META = 'metadata={op_name="jit(f)/shardops.gemm/psum" source_file="a b (1).py"}'

TEXTS = {
    # asynchronous pairs of the GPU compiler: (kind, bytes, groups, arrays)
    "all-reduce-start": (
        f"""
  %all-reduce-start.1 = f32[4,16]{{1,0}} all-reduce-start(%dot.1), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add, {META}, backend_config={{"is_sync":true}}
  %all-reduce-done.1 = f32[4,16]{{1,0}} all-reduce-done(%all-reduce-start.1), {META}""",
        ("all-reduce", 256, 4, 1),
    ),
    "all-reduce-start combined": (
        f"""
  %ar = (f32[4,16]{{1,0}}, bf16[8]{{0}}) all-reduce-start(%a, %b), replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, to_apply=%add, {META}
  %ard = (f32[4,16]{{1,0}}, bf16[8]{{0}}) all-reduce-done(%ar), {META}""",
        ("all-reduce", 272, 2, 2),
    ),
    "all-gather-start": (
        f"""
  %ag = (bf16[4,2]{{1,0}}, bf16[16,2]{{1,0}}) all-gather-start(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}, {META}
  ROOT %agd = bf16[16,2]{{1,0}} all-gather-done(%ag), {META}""",
        ("all-gather", 64, 4, 1),
    ),
    "all-gather-start combined": (
        f"""
  %ag = ((f32[4]{{0}}, f8e4m3fn[3]{{0}}), (f32[8]{{0}}, f8e4m3fn[6]{{0}})) all-gather-start(%p, %q), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, dimensions={{0}}, {META}
  %agd = (f32[8]{{0}}, f8e4m3fn[6]{{0}}) all-gather-done(%ag), {META}""",
        ("all-gather", 38, 2, 2),
    ),
    "all-gather-start whose done is elsewhere": (
        f"""
  %ag = (bf16[4,2]{{1,0}}, bf16[16,2]{{1,0}}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={{0}}, {META}""",
        ("all-gather", 64, 4, 1),
    ),
    "reduce-scatter-start": (
        f"""
  %rs = ((f32[16,8]{{1,0}}), f32[4,8]{{1,0}}, u32[]) reduce-scatter-start(%p), replica_groups=[2,4]<=[8], dimensions={{0}}, to_apply=%add, {META}
  %rsd = f32[4,8]{{1,0}} reduce-scatter-done(%rs), {META}""",
        ("reduce-scatter", 128, 4, 1),
    ),
    "reduce-scatter in a called computation": (
        f"""
%async_computation.2 (param: f32[16,8]) -> f32[4,8] {{
  %param = f32[16,8]{{1,0}} parameter(0)
  ROOT %reduce-scatter.3 = f32[4,8]{{1,0}} reduce-scatter(%param), replica_groups=[2,4]<=[8], dimensions={{0}}, to_apply=%add
}}

ENTRY %main (p: f32[16,8]) -> f32[4,8] {{
  %p = f32[16,8]{{1,0}} parameter(0)
  %rs = ((f32[16,8]{{1,0}}), f32[4,8]{{1,0}}) async-start(%p), calls=%async_computation.2, {META}
  ROOT %rsd = f32[4,8]{{1,0}} async-done(%rs), {META}
}}""",
        ("reduce-scatter", 128, 4, 1),
    ),
    "collective-permute-start": (
        f"""
  %cp = (f32[2,3]{{1,0}}, f32[2,3]{{1,0}}, u32[], u32[]) collective-permute-start(%p), channel_id=1, source_target_pairs={PERMUTE}, {META}
  %cpd = f32[2,3]{{1,0}} collective-permute-done(%cp), {META}""",
        ("collective-permute", 24, 2, 1),
    ),
    "done with a typed operand": (
        f"""
  %ag = (s8[4]{{0}}, s8[8]{{0}}) all-gather-start(s8[4]{{0}} %p), replica_groups={{{{0,1}}}}, dimensions={{0}}, {META}
  %agd = s8[8]{{0}} all-gather-done((s8[4]{{0}}, s8[8]{{0}}) %ag)""",
        ("all-gather", 8, 2, 1),
    ),
    # ways to write groups
    "groups: mesh": (
        f"  %x = f32[4]{{0}} all-reduce(%p), replica_groups=mesh['dp'=2,'tp'=4] {{'tp'}}, {META}",
        ("all-reduce", 16, 4, 1),
    ),
    "groups: mesh, two axes, device order": (
        f"  %x = f32[4]{{0}} all-reduce(%p), replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {{'a','c'}}, {META}",
        ("all-reduce", 16, 8, 1),
    ),
    "groups: mesh, part of an axis": (
        f"  %x = f32[4]{{0}} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4] {{'b':(1)2}}, {META}",
        ("all-reduce", 16, 2, 1),
    ),
    "groups: everybody": (
        f"  %x = f32[4]{{0}} all-reduce(%p), replica_groups={{}}, to_apply=%add, {META}",
        ("all-reduce", 16, 8, 1),
    ),
    # types
    "scalar": (
        f"  %x = f32[] all-reduce(%p), replica_groups=[1,8]<=[8], {META}",
        ("all-reduce", 4, 8, 1),
    ),
    "empty": (
        f"  %x = f32[0,5]{{1,0}} all-reduce(%p), replica_groups=[1,8]<=[8], {META}",
        ("all-reduce", 0, 8, 1),
    ),
    "tiled layout, packed int4": (
        f"  %x = s4[3,3]{{1,0:T(8,128)E(4)}} all-gather(%p), replica_groups=[1,8]<=[8], {META}",
        ("all-gather", 5, 8, 1),
    ),
    "numbered tuple": (
        f"  %x = (f16[1]{{0}}, pred[2]{{0}}, /*index=2*/c64[3]{{0}}) all-reduce(%p, %q, %r), replica_groups=[1,8]<=[8], {META}",
        ("all-reduce", 28, 8, 3),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_collectives_of_a_text(name):
    text, want = TEXTS[name]
    (found,) = hlo.collectives(HEADER + text)
    assert (found.kind, found.bytes, found.groups, found.arrays) == want
    assert hlo.asked_by(found) == "shardops.gemm"


def test_collectives_ignores_words_that_are_not_instructions():
    text = HEADER + (
        "  %all-reduce.7 = f32[4]{0} fusion(%p), kind=kLoop, calls=%all-gather, metadata={op_name="
        '"jit(f)/all-reduce(x)"}\n'
        "  %gte = f32[4]{0} get-tuple-element(%all-reduce), index=0\n"
        '  %cc = f32[4]{0} custom-call(%all-gather.1), custom_call_target="all-reduce(x)"\n'
    )
    assert hlo.collectives(text) == ()


def test_collectives_without_any_name():
    text = HEADER + "  %x = f32[4]{0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}"
    (found,) = hlo.collectives(text)
    assert found.op_name == ""
    assert hlo.asked_by(found) == "unknown"


def test_summary_takes_collectives():
    one = hlo.Collective("all-reduce", 4, "f32", (1,), 2, "")
    assert hlo.summary((one, one)) == {"all-reduce": (2, 8)}


def test_collectives_refuses_what_is_not_compiled():
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(ValueError, match=r"StableHLO; expected compiled HLO.*\.compile\(\)"):
        hlo.collectives(lowered)
    with pytest.raises(TypeError, match="compiled_or_text has type int"):
        hlo.collectives(3)
