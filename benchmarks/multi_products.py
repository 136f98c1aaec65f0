"""Sharded products for `multi.py`: what is timed of each, in bfloat16 and of 8-bit operands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

import shardops as so
from multi_timing import Program, alone, by_xla, drawn, mesh_of

RECIPES: dict[str, Any] = {
    "bfloat16": None,
    "current": so.recipes.CurrentScaling(),
    "delayed": so.recipes.DelayedScaling(amax_history_len=16),
    "block_128": so.recipes.Block128Scaling(),
}


@dataclass(frozen=True)
class Layout:
    """Specs of x [tokens, k], w [k, n] and the result, and which of the three a device has a part
    of while it multiplies."""

    x: P
    w: P
    y: P
    cut: int


LAYOUTS = {
    "column": Layout(P(), P(None, "tp"), P(None, "tp"), 2),
    "row, all-reduced": Layout(P(None, "tp"), P("tp"), P(), 1),
    "row, scattered": Layout(P(None, "tp"), P("tp"), P("tp"), 1),
    "sequence, column": Layout(P("tp"), P(None, "tp"), P(None, "tp"), 2),
    "fsdp": Layout(P("tp"), P("tp"), P("tp"), 0),
}


@dataclass(frozen=True)
class Product:
    """One to be timed. Forward of 8-bit operands: these are quantised beforehand; with its gradient
    it is `so.dense`, quantisation included."""

    layout: str
    operands: str  # of RECIPES
    backward: bool
    devices: int
    shape: tuple[int, int, int]  # tokens, k, n
    scaling: str = "strong"
    peers: bool = True  # beside XLA

    @property
    def name(self) -> str:
        return self.layout

    @property
    def flops(self) -> float:
        """Of all devices."""
        tokens, k, n = self.shape
        return 2.0 * tokens * k * n * (3 if self.backward else 1)

    def programs(self) -> tuple[dict[str, Program], Any]:
        """What to time by name, and the report of `explain`."""
        layout, mesh = LAYOUTS[self.layout], mesh_of(self.devices)
        specs = (layout.x, layout.w, layout.y)
        with jax.set_mesh(mesh):
            operands = self._operands(mesh, self.shape, specs)
            step = self._step(lambda x, w: so.gemm(x, w, out_sharding=layout.y), layout.y)
            report = so.explain(step, compare=False)(*operands)
            found = {"shardops": Program.of(step, *operands)}
        moved = alone(report.collectives or (), mesh)
        if moved is not None:
            found["collectives alone"] = moved
            local = list(self.shape)
            local[layout.cut] //= self.devices
            one = self._operands(mesh_of(1), tuple(local), (P(),) * 3)
            one = jax.device_put(one, jax.devices()[0])
            found["kernels alone"] = Program.of(self._step(so.gemm, None), *one)
        if self.peers and self.operands in ("bfloat16", "current"):
            found |= self._xla(mesh, layout, operands)
        return found, report

    def _operands(self, mesh: Mesh, shape: tuple[int, ...], specs: Any) -> tuple[Any, ...]:
        tokens, k, n = shape
        x = drawn(mesh, (tokens, k), specs[0])
        w = drawn(mesh, (k, n), specs[1], k**-0.5)
        if self.backward:
            return x, w, drawn(mesh, (tokens, n), specs[2])
        recipe = RECIPES[self.operands]
        if recipe is None:
            return x, w
        roles = (x, recipe.quantizer("input", "rows")), (w, recipe.quantizer("kernel", "both"))
        with jax.set_mesh(mesh):
            return tuple(jax.jit(so.quantize)(a, q).detach() for a, q in roles)

    def _step(self, product: Callable[..., Any], out: Any) -> Callable[..., Any]:
        if not self.backward:
            return product
        recipe = RECIPES[self.operands]
        if recipe is None:
            return _with_gradient(product)
        quantizers = recipe.dense_quantizers()

        def dense(x: jax.Array, w: jax.Array) -> jax.Array:
            return so.dense(x, w, quantizers=so.recipes.watch(quantizers), out_sharding=out)

        return _with_gradient(dense)

    def _xla(self, mesh: Mesh, layout: Layout, operands: tuple[Any, ...]) -> dict[str, Program]:
        """Plain jnp on Auto axes, as XLA compiles it by default and with `OVERLAPPING`."""
        if self.backward and self.operands != "bfloat16":
            return {}
        auto = mesh_of(mesh.size, AxisType.Auto)
        at = [NamedSharding(auto, spec) for spec in (layout.x, layout.w, layout.y)]
        out = (at[2], at[0], at[1]) if self.backward else at[2]
        if self.operands == "bfloat16":
            plain = _with_gradient(jnp.matmul) if self.backward else jnp.matmul
            arrays = [jax.device_put(a, where) for a, where in zip(operands, at, strict=False)]
        else:  # a pattern that XLA knows as a product of 8-bit operands

            def plain(x: Any, x_scale: Any, w: Any, w_scale: Any) -> jax.Array:
                values = [
                    data.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
                    for data, scale in ((x, x_scale), (w, w_scale))
                ]
                return jnp.matmul(*values)

            everywhere = NamedSharding(auto, P())
            arrays = [
                jax.device_put(a, where)
                for one, spec in zip(operands, at, strict=False)
                for a, where in ((one.data, spec), (one.scale_inv, everywhere))
            ]
        with jax.set_mesh(auto):
            return by_xla(self.devices, plain, *arrays, out_shardings=out)


def _with_gradient(product: Callable[..., Any]) -> Callable[..., Any]:
    def both(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(product, x, w)
        return y, *pull(dy)

    return both


def products(devices: int, size: int) -> list[Product]:
    """Those of one number of devices; on one device, where strong and weak scaling start."""
    shape = (size, size, size)
    if devices == 1:
        halves = [tuple(size // 2 if i == cut else size for i in range(3)) for cut in range(3)]
        return [
            Product("column", "bfloat16", True, 1, shape, peers=False),
            *(
                Product(name, "bfloat16", True, 1, halves[layout.cut], "weak", peers=False)
                for name, layout in LAYOUTS.items()
            ),
        ]
    found = [Product(name, "bfloat16", True, devices, shape) for name in LAYOUTS]
    found += [Product(name, "bfloat16", False, devices, shape) for name in LAYOUTS]
    moving = ("sequence, column", "row, scattered", "fsdp")
    found += [Product(name, "current", False, devices, shape) for name in moving]
    found += [Product(name, "delayed", True, devices, shape) for name in moving]
    found += [Product(name, "block_128", False, devices, shape) for name in moving[::2]]
    if devices > 2:
        for name, layout in LAYOUTS.items():
            grown = [size] * 3
            grown[layout.cut] = size // 2 * devices
            found.append(Product(name, "bfloat16", True, devices, tuple(grown), "weak", False))
    return found
