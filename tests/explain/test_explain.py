"""What `explain` takes, which ops it lists, and what it says of plain XLA."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops.explaining import explain
from tests import meshes
from tests.explain.programs import LAYOUTS, jitted, placed
from tests.moved import SHAPES, wanted


def test_no_array_is_needed(mesh):
    row = (("dp", None, "tp"), ("tp",))

    def f(x, w):
        return so.gemm(x, w)

    structs = [
        jax.ShapeDtypeStruct(SHAPES[n], jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))
        for n, spec in zip("xw", row, strict=True)
    ]
    report = explain(f)(*structs)
    (entry,) = report.entries
    assert entry.record.dtypes == ("bfloat16", "bfloat16")
    assert [s.kind for s in entry.steps] == ["psum"]
    assert entry.plain.bytes == entry.bytes  # of 16-bit elements, whatever the CPU widens
    assert any("widens collectives" in n for n in report.notes)


def test_the_partitioner_of_plain_products_is_asked(mesh):
    """Where XLA moves the weight and the plan moves what is small."""
    x = meshes.place(mesh, jnp.ones((4, 64)), "dp")
    w = meshes.place(mesh, jnp.ones((64, 1024)), "dp", "tp")
    (entry,) = explain(lambda x, w: so.gemm(x, w))(x, w).entries
    assert entry.bytes < entry.plain.bytes
    (silent,) = explain(lambda x, w: so.gemm(x, w), compare=False)(x, w).entries
    assert silent.plain is None


def test_a_function_that_was_run_before_is_reported_all_the_same(mesh):
    f = jax.jit(lambda x, w: so.gemm(x, w))
    x, w = placed(mesh, x=("dp", None, "tp"), w=("tp",))
    f(x, w)
    first, second = explain(f)(x, w), explain(f)(x, w)
    assert str(first) == str(second)
    assert len(first.entries) == 1


def test_a_program_in_the_persistent_cache_is_reported_all_the_same(mesh, tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_remove_custom_partitioning_ptr_from_cache_key": True,
    }
    before = {name: getattr(jax.config, name) for name in options}
    f = jax.jit(lambda x, w: so.gemm(x, w))
    x, w = placed(mesh, x=("dp", None, "tp"), w=("tp",))
    compilation_cache.reset_cache()
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        reports = [explain(f)(x, w) for _ in range(2)]
        f(x, w)
        jax.clear_caches()
        reports.append(explain(f)(x, w))
        jax.jit(lambda x: x + 2)(x)
        assert any(tmp_path.iterdir())  # and the cache is on again
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert [len(r.entries) for r in reports] == [1, 1, 1]


def test_equal_calls_are_listed_each(mesh):
    """JAX traces them once."""

    def f(x, w):
        for _ in range(3):
            x = so.gemm(x, w, activation="gelu", out_sharding=wanted(mesh, "dp", "tp"))
        return (x,)

    x = meshes.place(mesh, jnp.ones((16, 32)), "dp", "tp")
    w = meshes.place(mesh, jnp.ones((32, 32)), "tp")
    forward = explain(jitted(mesh, f, ("dp", "tp")))(x, w)
    assert len(forward.entries) == 3
    assert forward.bytes == pytest.approx(forward.compiled_bytes)

    def loss(x, w):
        return jnp.sum(jnp.sin(f(x, w)[0]))

    gradient = jitted(mesh, jax.grad(loss, (0, 1)), ("dp", "tp"), ("tp",))
    report = explain(gradient, compare=False)(x, w)
    assert [e.backward for e in report.entries] == 3 * [False] + 6 * [True]
    assert report.bytes == pytest.approx(report.compiled_bytes)


def test_an_op_in_a_loop_is_listed_once(mesh):
    def f(x, ws):
        return jax.lax.scan(lambda x, w: (so.gemm(x, w, out_sharding=kept), None), x, ws)[0]

    kept = wanted(mesh, "dp", None, None)
    ws = meshes.place(mesh, jnp.ones((3, 32, 32)), None, "tp")
    x = meshes.place(mesh, jnp.ones((8, 16, 32)), "dp")
    report = explain(jitted(mesh, lambda x, ws: (f(x, ws),), ("dp",)))(x, ws)
    assert len(report.entries) == 1
    assert report.bytes == pytest.approx(report.compiled_bytes)
    assert any("listed once" in n for n in report.notes)


def test_an_all_reduce_of_which_a_slice_is_kept_counts_as_a_reduce_scatter(mesh):
    x, w, y = LAYOUTS["row, scattered"]
    f = jitted(mesh, lambda x, w: (so.gemm(x, w, out_sharding=wanted(mesh, *y)),), y)
    (entry,) = explain(f)(*placed(mesh, x=x, w=w)).entries
    assert entry.plain.kinds == {"reduce-scatter": 1}
    assert entry.plain.bytes == entry.bytes


def test_an_op_in_shard_map_is_not_listed(mesh):
    def body(x, w):
        return jax.lax.psum(so.gemm(x, w), "tp")

    specs = (P("dp", None, "tp"), P("tp"))
    f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    report = explain(f)(*placed(mesh, x=specs[0], w=specs[1]))
    assert report.entries == ()
    assert report.compiled_bytes == 0
    assert [c.kind for c in report.other_collectives] == ["all-reduce"]
    assert "besides: " in str(report)
    assert any("shard_map" in n for n in report.notes)


def test_on_axes_of_both_types_an_op_is_listed_for_each():
    with meshes.entered("explicit-auto") as mesh:
        x, w = placed(mesh, x=("dp", None, "tp"), w=("dp",))
        f = jitted(mesh, lambda x, w: (so.gemm(x, w, out_sharding=P("dp")),))
        report = explain(f)(x, w)
    routes = {e.record.route: e for e in report.entries}
    assert sorted(routes) == ["auto", "explicit"]
    assert "rhs is gathered over dp" in routes["explicit"].reason
    assert routes["auto"].record.shapes[0] == (SHAPES["x"][0] // 2, *SHAPES["x"][1:])
    assert all(e.plain.kinds is not None for e in report.entries)
    assert any("for each of them" in n for n in report.notes)


def test_on_one_device_ops_are_listed_and_move_nothing():
    def loss(x, w, gamma):
        return so.softmax(so.rms_norm(so.gemm(x, w, activation="gelu"), gamma)).sum()

    x, w, gamma = jnp.ones((4, 16)), jnp.ones((16, 8)), jnp.ones(8)
    report = explain(loss)(x, w, gamma)
    assert [e.name for e in report.entries] == ["gemm", "rms_norm", "softmax"]
    gradient = explain(jax.grad(loss, (0, 1, 2)))(x, w, gamma)
    names = [e.name for e in gradient.entries if e.backward]
    assert names == ["softmax", "rms_norm", "gemm", "gemm"]
    for entry in (*report.entries, *gradient.entries):
        assert (entry.bytes, entry.plain, entry.suggestion) == (0, None, None)
        assert entry.reason == "one device has it all: no collective."
    assert "1. gemm, forward (one device)" in str(report)
    assert "float32[M 4, K 16]" in str(report)
    batched = explain(jax.vmap(loss, (0, None, None)))(jnp.ones((3, 4, 16)), w, gamma)
    assert [e.record.shapes[0] for e in batched.entries] == [(3, 4, 16), (3, 4, 8), (3, 4, 8)]
    # What nobody uses is in no program.
    assert explain(lambda x: (so.softmax(x), x + 1)[1])(x).entries == ()


@pytest.mark.parametrize("axes", [(), ("d",)], ids=["one device", "Explicit axes"])
def test_ops_on_operands_of_equal_shapes_are_told_apart(axes):
    def run(x):
        half = so.softmax(x.astype(jnp.bfloat16)).astype(jnp.float32)
        return so.gemm(so.gemm(so.softmax(x), half, activation="gelu"), x)

    kinds = (jax.sharding.AxisType.Explicit,) * len(axes)
    mesh = jax.make_mesh((8,) * len(axes), axes, axis_types=kinds)
    with jax.set_mesh(mesh) if axes else contextlib.nullcontext():
        entries = explain(run)(jnp.ones((8, 8))).entries
    assert [e.name for e in entries] == ["softmax", "softmax", "gemm", "gemm"]
    assert [e.record.dtypes[0] for e in entries[:2]] == ["bfloat16", "float32"]
    assert [e.record.op.activation for e in entries[2:]] == ["gelu", None]


def test_arguments_that_come_sharded_make_it_no_op_of_one_device():
    devices = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((16, 8)), NamedSharding(devices, P("d")))
    (entry,) = explain(lambda x: so.softmax(x))(x).entries
    assert (entry.record.route, entry.record.sizes) == ("auto", (("d", 8),))


def test_link_is_named_and_checked(mesh):
    x, w = placed(mesh, x=("dp", None, "tp"), w=("tp",))
    slow = explain(lambda x, w: so.gemm(x, w), link="pcie5")(x, w)
    fast = explain(lambda x, w: so.gemm(x, w))(x, w)
    assert slow.link.name == "pcie5"
    assert slow.microseconds > fast.microseconds > 0
    with pytest.raises(ValueError, match="explain: link is 'string'"):
        explain(lambda x: x, link="string")


def test_explain_is_public():
    assert so.explain is explain
    assert so.Report is type(explain(lambda x: x)(jnp.ones(1)))
