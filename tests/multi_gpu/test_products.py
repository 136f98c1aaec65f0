"""Products on real collectives: values and gradients, in 16, 32 and 8 bits, and what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardops as so
from shardops import hlo
from tests import cases, meshes
from tests.closeness import assert_shards_close
from tests.kernels.scaled_calls import in_float64
from tests.layers import eight_bits
from tests.layers.test_dense_quantized import check, value_and_vjp
from tests.multi_gpu import grid

B, S, K, N = 8, 64, 256, 512
WHOLE_BLOCKS = (2, 512, 512, 512)  # B, S, K, N that four devices cut into blocks of 128

LAYOUTS = {
    "column": (P("dp"), P(None, "tp"), P("dp", None, "tp")),
    "row": (P("dp", None, "tp"), P("tp"), P("dp")),
    "row, scattered": (P("dp", None, "tp"), P("tp"), P("dp", "tp")),
    "sequence, column": (P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")),
    "fsdp": (P("tp"), P("tp"), P("tp")),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def drawn(rng, dtype, b, s, k, n):
    x, w, dy = ((b, s, k), 1), ((k, n), 0.1), ((b, s, n), 1)
    return [cases.random(rng, shape, dtype, scale) for shape, scale in (x, w, dy)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_layout
def test_gemm_and_its_gradient(mesh, rng, layout, dtype):
    specs = LAYOUTS[layout]
    arrays = drawn(rng, dtype, B, S, K, N)

    @jax.jit
    def step(x, w, dy):
        y, pull = jax.vjp(lambda x, w: so.gemm(x, w, out_sharding=specs[2]), x, w)
        return y, *pull(dy)

    y, dx, dw = step(*(meshes.place(mesh, a, *at) for a, at in zip(arrays, specs, strict=True)))
    x, w, dy = (np.asarray(a, np.float64) for a in arrays)
    assert_shards_close(y, x @ w, reduced=K, roundings=2)
    assert_shards_close(dx, dy @ w.T, reduced=N, roundings=2)
    assert_shards_close(dw, np.einsum("bsk,bsn->kn", x, dy), reduced=B * S, roundings=2)


def received(found):
    """{kind: bytes a device}, however XLA combined what moves."""
    out = {}
    for c in found:
        out[c.kind] = out.get(c.kind, 0) + hlo.received_bytes(c)
    return out


@pytest.mark.parametrize("recipe", ["bfloat16", "current", "block"])
@each_layout
def test_what_a_product_moves(layout, recipe):
    """8-bit data move at a byte an element, and nothing moves that the product does not need.

    Few tokens, so that they move rather than the kernel; with FSDP many.
    """
    specs = LAYOUTS[layout]
    b, s, k, n = 512 if layout == "fsdp" else 8, 8, 512, 512
    dp, tp = grid.sizes().values()
    with grid.entered("explicit") as mesh:
        x = meshes.place(mesh, jnp.ones((b, s, k), jnp.bfloat16), *specs[0])
        w = meshes.place(mesh, jnp.ones((k, n), jnp.bfloat16), *specs[1])
        operands = (x, w)
        if recipe != "bfloat16":
            made = eight_bits.RECIPES[recipe]
            quantizers = made.quantizer("input", "rows"), made.quantizer("kernel", "both")
            operands = tuple(
                jax.jit(so.quantize)(a, q).detach()
                for a, q in zip(operands, quantizers, strict=True)
            )
        f = jax.jit(lambda x, w: so.gemm(x, w, out_sharding=specs[2]))
        found = hlo.collectives(f.lower(*operands).compile())
    assert all(hlo.asked_by(c) == "shardops.gemm" for c in found)
    rows, others = b * s // dp, (tp - 1) / tp
    width = 2 if recipe == "bfloat16" else 1
    # A float32 scale comes along with 1 x 128 elements of x, with 128 x 128 of w.
    of_x, of_w = (4 / 128, 4 / 128**2) if recipe == "block" else (0, 0)
    want = {
        "column": {},
        "row": {"all-reduce": 2 * 2 * rows * n * others},
        "row, scattered": {"reduce-scatter": 2 * rows * n * others},
        "sequence, column": {"all-gather": rows * k * (width + of_x) * others},
        "fsdp": {"all-gather": k * n * (width + of_w) * others},
    }
    assert received(found) == want[layout]


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@each_layout
def test_gemm_of_scaled_operands(mesh, rng, layout, recipe):
    """Quantised on the mesh, then multiplied: the product of the values that the bits stand for."""
    specs = LAYOUTS[layout]
    b, s, k, n = WHOLE_BLOCKS
    x, w, _ = drawn(rng, "bfloat16", 4 * b, s, k, n)
    made = eight_bits.RECIPES[recipe]
    quantizers = [made.quantizer("input", "rows"), made.quantizer("kernel", "both")]

    @jax.jit
    def step(x, w, qs):
        scaled = so.quantize(x, qs[0]), so.quantize(w, qs[1])
        y = so.gemm(*scaled, out_sharding=specs[2], precise_accumulation=True)
        return y, *(one.detach() for one in scaled)

    placed = (meshes.place(mesh, a, *at) for a, at in zip((x, w), specs, strict=False))
    y, *scaled = step(*placed, quantizers)
    want = in_float64(scaled[0]) @ in_float64(scaled[1])
    assert_shards_close(y, want, reduced=k, roundings=2)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_dense_tensor_and_sequence_parallel(mesh, rng, recipe):
    """Both passes in 8 bits, against products in float64 of what is rounded; largest magnitudes
    are those of whole arrays, on every device."""
    b, s, k, n = WHOLE_BLOCKS
    shapes = (((b, s, k), 1), ((k, n), 0.1), ((n,), 1), ((b, s, n), 1e-3))
    x, kernel, bias, dz = (cases.random(rng, shape, "bfloat16", by) for shape, by in shapes)
    qs = eight_bits.quantizers(recipe, x, kernel, dz)

    def f(x, kernel, bias, qs):
        options = {"batch_dims": ((0,), ()), "out_sharding": P("dp", None, "tp")}
        return so.dense(x, kernel, bias, quantizers=qs, precise_accumulation=True, **options)

    got = value_and_vjp(
        f,
        meshes.place(mesh, x, "dp", "tp"),
        meshes.place(mesh, kernel, None, "tp"),
        meshes.place(mesh, bias, "tp"),
        meshes.place(mesh, dz, "dp", None, "tp"),
        qs,
    )
    check(got, x, kernel, bias, dz, qs)
