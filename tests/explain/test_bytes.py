"""Reports of programs: their bytes are those of the compiled program."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from shardops.explaining import explain
from tests import meshes
from tests.explain.programs import LAYOUTS, jitted, placed
from tests.moved import wanted


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_forward_bytes_are_those_of_the_program(mesh, layout):
    x, w, y = layout

    def f(x, w):
        return (so.gemm(x, w, out_sharding=wanted(mesh, *y)),)

    report = explain(jitted(mesh, f, y))(*placed(mesh, x=x, w=w))
    (entry,) = report.entries
    assert report.bytes == pytest.approx(report.compiled_bytes)
    assert not entry.backward
    assert entry.plain is not None
    assert entry.bytes <= entry.plain.bytes
    kinds = {s.kind for s in entry.steps if s.collective}
    assert len(kinds) == len(hlo.summary(report.collectives))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradient_bytes_are_those_of_the_program(mesh, layout):
    x, w, y = layout

    def f(x, w, c):
        def loss(x, w):
            return jnp.sum(so.gemm(x, w, out_sharding=wanted(mesh, *y)) * c)

        return jax.grad(loss, (0, 1))(x, w)

    report = explain(jitted(mesh, f, x, w), compare=False)(*placed(mesh, x=x, w=w, y=y))
    # Nobody needs the product itself: its op is traced, and gone from the program.
    assert sorted(e.gradient for e in report.entries) == ["lhs", "rhs"]
    assert all(e.backward for e in report.entries)
    assert report.bytes == pytest.approx(report.compiled_bytes)


def test_what_moves_for_one_product_is_not_moved_for_the_other(explicit_mesh):
    x, w, y = LAYOUTS["row, scattered"]

    def f(x, w, c):
        def loss(x, w):
            return jnp.sum(so.gemm(x, w, out_sharding=P(*y)) * c)

        return jax.grad(loss, (0, 1))(x, w)

    report = explain(f)(*placed(explicit_mesh, x=x, w=w, y=y))
    entries = {e.gradient: e for e in report.entries}
    first, second = entries["lhs"].operands[0], entries["rhs"].operands[1]
    assert (first.array.name, first.spec) == ("dout", (("dp",), ("tp",), ()))
    assert first.used == second.spec == second.used == (("dp",), (), ())
    assert "dout is gathered over tp" in entries["lhs"].reason
    assert "gathered" not in entries["rhs"].reason
    assert entries["lhs"].record.wanted == ((("dp",), (), ("tp",)),)
    assert entries["rhs"].record.wanted == ((("tp",), ()),)


def test_gradient_of_a_layer(mesh):
    """Norm, column- and row-parallel product, residual: forward and backward in one report."""

    def f(x, gamma, up, down):
        def loss(*arrays):
            x, gamma, up, down = arrays
            y, x = so.rms_norm(x, gamma, return_input=True)
            hidden = so.gemm(y, up, activation="gelu", out_sharding=wanted(mesh, "dp", None, "tp"))
            out = so.gemm(hidden, down, add=x, out_sharding=wanted(mesh, "dp", "tp"))
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1, 2, 3))(x, gamma, up, down)

    layouts = ("dp", "tp"), (), (None, "tp"), ("tp",)
    shapes = (8, 16, 32), (32,), (32, 64), (64, 32)
    pairs = zip(shapes, layouts, strict=True)
    arrays = [meshes.place(mesh, jnp.ones(shape), *spec) for shape, spec in pairs]
    report = explain(jitted(mesh, f, *layouts), compare=False)(*arrays)
    # x is gathered for the first product, and again for its weight's gradient: on Explicit axes
    # XLA sees that the two are one.
    twice = 4 * (8 // 2) * 16 * 32 * 3 / 4 if meshes.explicit_axes(mesh) else 0
    assert report.bytes - twice == pytest.approx(report.compiled_bytes)
    assert ("equal collectives are merged" in str(report)) == bool(twice)
    names = [(e.name, e.backward, e.gradient) for e in report.entries]
    assert sorted(names) == sorted(
        [
            ("rms_norm", False, ""),
            ("gemm", False, ""),
            ("gemm", False, ""),
            ("gemm", True, "lhs"),
            ("gemm", True, "rhs"),
            ("gemm", True, "lhs"),
            ("gemm", True, "rhs"),
            ("rms_norm", True, ""),
        ]
    )
    text = str(report)
    assert "gemm, backward" in text
    assert "the parameters' gradients sum over rows: all-reduce" in text
    assert text.count("<svg") == 0 < report.to_html().count("<svg")


def test_the_gradient_of_a_bias_is_an_op_of_its_own(mesh):
    def f(x, w, bias, c):
        def loss(x, w, bias):
            y = so.gemm(x, w, bias=bias, activation="gelu", out_sharding=wanted(mesh, "dp"))
            return jnp.sum(y * c)

        return jax.grad(loss, (0, 1, 2))(x, w, bias)

    row = ("dp", None, "tp"), ("tp",), ()
    arrays = placed(mesh, x=row[0], w=row[1], vector=row[2], y=("dp",))
    report = explain(jitted(mesh, f, *row), compare=False)(*arrays)
    assert report.bytes == pytest.approx(report.compiled_bytes)
    (sums,) = [e for e in report.entries if [a.array.name for a in e.operands] == ["x"]]
    assert sums.backward
    assert "the summed dims are sharded over dp: partial sums, so all-reduce" in sums.reason


@pytest.mark.parametrize("stats", ["gather", "distributed"])
def test_norm_bytes_are_those_of_the_program(mesh, stats):
    def f(x, gamma, c):
        def loss(x, gamma):
            return jnp.sum(so.layer_norm(x, gamma, stats=stats) * c)

        return jax.value_and_grad(loss, (0, 1))(x, gamma)[1]

    x = ("dp", None, "tp")
    c = ("dp",) if stats == "gather" else x  # as the result lies
    arrays = [*placed(mesh, y=x, vector=()), *placed(mesh, y=c)]
    report = explain(jitted(mesh, f, x, ()))(*arrays)
    assert {e.name for e in report.entries} == {"layer_norm"}
    assert {e.backward for e in report.entries} == {False, True}
    assert report.bytes == pytest.approx(report.compiled_bytes)
    word = "gathered" if stats == "gather" else "statistics are summed"
    assert word in report.entries[0].reason
