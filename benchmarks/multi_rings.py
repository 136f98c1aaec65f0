"""Times products that run beside their collective, by hand: evidence for decision 0021.

    python benchmarks/multi_rings.py [--size 8192] [--timeline]

x [tokens@tp, k] is gathered for, or the result scattered after, a product of `so.gemm` in a
shard_map: in one collective, or in a ring, whose parts travel while others are multiplied. Time is
that of a step in a chain of steps; the error is the relative one of the result against the plain
way's, the rest is from a profile. `--timeline`: when each kernel of a step began and how long it
took. It needs two GPUs; on virtual CPU devices it is a smoke test with tiny shapes.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

import shardops as so
from multi_products import RECIPES
from multi_timing import Program, beside, chained, drawn, mesh_of, profiled

OPERANDS = ("bfloat16", "current")
CALLS = 4  # of a timeline


# ---- the forms, of one device's arrays -----------------------------------------------------------


def gathered(x: Any, w: Any) -> jax.Array:
    """One all-gather, then the product."""
    return so.gemm(_of_rows(x, lambda a: jax.lax.all_gather(a, "tp", tiled=True)), w)


def gathered_in_a_ring(x: Any, w: Any) -> jax.Array:
    """Each part of x is multiplied while the next one comes; then the results change places."""
    products = _by_part(x, w)
    size, rows = len(products), products[0].shape[0]
    turned = jnp.concatenate([*products, *products[:-1]])
    start = (-jax.lax.axis_index("tp")) % size * rows
    return jax.lax.dynamic_slice_in_dim(turned, start, size * rows)


def gathered_not_placed(x: Any, w: Any) -> tuple[jax.Array, ...]:
    """The ring alone, its results where they are: what it would be without copies."""
    return tuple(_by_part(x, w))


def scattered(x: Any, w: Any) -> jax.Array:
    """The product, then one reduce-scatter."""
    return jax.lax.psum_scatter(so.gemm(x, w), "tp", tiled=True)


def scattered_in_a_ring(x: Any, w: Any) -> jax.Array:
    """Sums of a part of the rows travel while the next part is multiplied."""
    return _summed_round(x, w, pieces=1)


def scattered_in_halves(x: Any, w: Any) -> jax.Array:
    """The same with two sums under way, to which the product's own kernel adds."""
    return _summed_round(x, w, pieces=2)


def _by_part(x: Any, w: Any) -> list[jax.Array]:
    """Products of this device's part of x, of the next device's, and so on round the ring."""
    size, products = jax.lax.axis_size("tp"), []
    for left in reversed(range(size)):
        coming = _of_rows(x, lambda a: _passed_on(a, -1)) if left else None
        product = so.gemm(x, w)
        if left > 1:
            # Else XLA has all parts come before it multiplies the first one.
            coming, product = jax.lax.optimization_barrier((coming, product))
        products.append(product)
        x = coming
    return products


def _summed_round(x: Any, w: Any, pieces: int) -> jax.Array:
    size = jax.lax.axis_size("tp")
    rows = jax.tree.leaves(x)[0].shape[0] // (size * pieces)
    totals: list[Any] = [None] * pieces
    for step in range(1, size + 1):
        part = (jax.lax.axis_index("tp") - step) % size
        for n in range(pieces):
            start = (part * pieces + n) * rows
            cut = _of_rows(x, lambda a, start=start: jax.lax.dynamic_slice_in_dim(a, start, rows))
            total = totals[n]
            if pieces > 1:
                total = so.gemm(cut, w, add=total)
            else:
                product = so.gemm(cut, w)
                total = product if total is None else _added(product, total)
            totals[n] = _passed_on(total, 1) if step < size else total
    return totals[0] if pieces == 1 else jnp.concatenate(totals)


def _added(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def _of_rows(x: Any, function: Callable[[jax.Array], jax.Array]) -> Any:
    """x, or its 8-bit data, by `function`; its one scale as it is."""
    return jax.tree.map(lambda a: function(a) if a.ndim else a, x)


def _passed_on(x: jax.Array, by: int) -> jax.Array:
    size = jax.lax.axis_size("tp")
    return jax.lax.ppermute(x, "tp", [(n, (n + by) % size) for n in range(size)])


GATHERED = P("tp"), P(None, "tp"), P(None, "tp")
SCATTERED = P(None, "tp"), P("tp"), P("tp")
FORMS: tuple[tuple[Callable[..., Any], tuple[P, P, P]], ...] = (
    (gathered, GATHERED),
    (gathered_in_a_ring, GATHERED),
    (gathered_not_placed, GATHERED),
    (scattered, SCATTERED),
    (scattered_in_a_ring, SCATTERED),
    (scattered_in_halves, SCATTERED),
)

# --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8192, help="tokens, k and n")
    parser.add_argument("--timeline", action="store_true")
    asked = parser.parse_args(arguments)
    found = jax.devices()
    if len(found) < 2:
        print("multi_rings: one device; expected at least 2. On a CPU set "
              "XLA_FLAGS=--xla_force_host_platform_device_count=2.", file=sys.stderr)  # fmt: skip
        return 2
    on_gpu = found[0].platform == "gpu"
    size = asked.size if on_gpu else 256
    print(f"{len(found)} x {found[0].device_kind}, jax {jax.__version__}, {size}^3")
    print("| form | operands | µs | error | kernels | collectives | beside a kernel |\n"
          "|---|---|---|---|---|---|---|")  # fmt: skip
    for operands in OPERANDS:
        plain: Any = None
        for form, specs in FORMS:
            program = compiled(form, specs, operands, size)
            got, error = program(), ""
            if form in (gathered, scattered):
                plain = got
            elif isinstance(got, jax.Array):
                error = f"{_error(got, plain):.1e}"
            seen = beside(program)
            cells = ["", "", ""]
            if seen is not None:
                cells = [f"{t:.0f}" for t in (seen.kernels, seen.collectives, seen.both)]
            name = form.__name__.replace("_", " ")
            print(f"| {' | '.join([name, operands, f'{chained(program):.0f}', error, *cells])} |",
                  flush=True)  # fmt: skip
            if asked.timeline and on_gpu:
                _print_timeline(program)
    return 0


def compiled(form: Callable[..., Any], specs: tuple[P, P, P], operands: str, size: int) -> Program:
    mesh = mesh_of(len(jax.devices()))
    x: Any = drawn(mesh, (size, size), specs[0])
    w: Any = drawn(mesh, (size, size), specs[1], size**-0.5)
    recipe = RECIPES[operands]
    with jax.set_mesh(mesh):
        if recipe is not None:
            roles = (x, recipe.quantizer("input", "rows")), (w, recipe.quantizer("kernel", "both"))
            x, w = (jax.jit(so.quantize)(a, q).detach() for a, q in roles)
        lie = jax.tree.map(lambda a: a.sharding.spec, (x, w))
        mapped = jax.shard_map(form, in_specs=lie, out_specs=specs[2], check_vma=False)
        return Program.of(mapped, x, w)


def _error(got: jax.Array, want: jax.Array) -> float:
    difference = (got - want).astype(jnp.float32)
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(want.astype(jnp.float32)))


def _print_timeline(program: Program) -> None:
    """The last call but one, on each device."""
    for device, events in enumerate(profiled(program, CALLS)):
        each = len(events) // CALLS
        step = events[-2 * each : -each]
        for name, start, end in step:
            print(f"    {device}: {start - step[0][1]:8.1f} + {end - start:6.1f}  {name[:70]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
