"""Drawn products: gemm and dot_general with any dims, layouts, dtypes and options."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh

import shardops as so
from tests import cases, references
from tests.fuzz.settings import SIZES, Draw, Setting, Spec, draw_spec, joined, to_p

Dims = tuple[int, ...]
Pair = tuple[Dims, Dims]


@dataclasses.dataclass(frozen=True)
class Product:
    """One product. `specs` and `mapped` have a Spec for each operand, and one for the result."""

    op: str
    lhs: Dims
    rhs: Dims
    contracting: Pair
    batch: Pair
    specs: tuple[tuple[str, Spec], ...]  # over the axes that the op sees; "out": what is wanted
    mapped: tuple[tuple[str, Spec], ...]  # over the axes that a shard_map maps
    dtype: str = "float32"
    out_dtype: str | None = None
    bias: bool = False
    add: bool = False
    activation: str | None = None
    batch_like: Pair = ((), ())
    wanted: str | None = None  # None | "cheapest" | "spec"

    @property
    def names(self) -> tuple[str, ...]:
        return ("lhs", "rhs", *(("bias",) * self.bias), *(("add",) * self.add))

    @property
    def rhs_free(self) -> Dims:
        return tuple(
            n for d, n in enumerate(self.rhs) if d not in self.contracting[1] + self.batch[1]
        )

    @property
    def out(self) -> Dims:
        lhs_free = [
            n for d, n in enumerate(self.lhs) if d not in self.contracting[0] + self.batch[0]
        ]
        return (*(self.lhs[d] for d in self.batch[0]), *lhs_free, *self.rhs_free)

    @property
    def reduced(self) -> int:
        return math.prod(self.lhs[d] for d in self.contracting[0])

    @property
    def summed(self) -> tuple[str, ...]:
        """Mapped axes on contracting dims: summed by hand after the op."""
        return tuple(a for d in self.contracting[0] for a in dict(self.mapped)["lhs"][d])

    def shape(self, name: str) -> Dims:
        return {"lhs": self.lhs, "rhs": self.rhs, "bias": self.rhs_free}.get(name, self.out)

    def spec(self, name: str) -> Spec:
        """Where an operand lies on the whole mesh."""
        return joined(dict(self.mapped)[name], dict(self.specs)[name])

    # ---- what runs -------------------------------------------------------------------------------

    def arrays(self, rng: np.random.Generator) -> dict[str, Any]:
        scale = {"rhs": max(self.reduced, 1) ** -0.5}
        dtypes = {"add": self.out_dtype or self.dtype}
        return {
            n: cases.random(rng, self.shape(n), dtypes.get(n, self.dtype), scale.get(n, 1.0))
            for n in self.names
        }

    def cotangents(self, rng: np.random.Generator, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """One; 0 where the slope of relu depends on how the pre-activation was rounded."""
        cotangent = cases.random(rng, self.out, self.out_dtype or self.dtype)
        if self.activation == "relu":
            unsure = np.abs(self._pre_activation(arrays)) < 0.1
            cotangent = np.where(unsure, np.zeros_like(cotangent), cotangent)
        return (cotangent,)

    def call(self, setting: Setting, mesh: Mesh, arrays: Mapping[str, jax.Array]) -> jax.Array:
        if not setting.manual:
            return self._op(arrays)
        mapped = dict(self.mapped)

        def body(arrays: Mapping[str, jax.Array]) -> jax.Array:
            out = self._op(arrays)
            return jax.lax.psum(out, self.summed) if self.summed else out

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=({n: to_p(mapped[n]) for n in self.names},),
            out_specs=to_p(mapped["out"]),
            axis_names=set(setting.manual),
            check_vma=setting.check_vma,
        )(dict(arrays))

    def _op(self, arrays: Mapping[str, jax.Array]) -> jax.Array:
        wanted = to_p(dict(self.specs)["out"]) if self.wanted == "spec" else self.wanted
        if self.op == "dot_general":
            numbers = (self.contracting, self.batch)
            return so.dot_general(
                arrays["lhs"],
                arrays["rhs"],
                numbers,
                preferred_element_type=self.out_dtype,
                out_sharding=wanted,
            )
        return so.gemm(
            **arrays,
            contracting_dims=self.contracting,
            batch_dims=self.batch_like,
            activation=self.activation,
            out_dtype=self.out_dtype,
            out_sharding=wanted,
        )

    # ---- what is right ---------------------------------------------------------------------------
    #
    # Each as (name, value, scale, reduced, roundings). The scale is the size of the numbers that
    # are added, as a root of the sum of their squares: a sum of few terms may be far smaller.

    def _numbers(self) -> tuple[Pair, Pair]:
        return self.contracting, self.batch

    def _pre_activation(self, arrays: Mapping[str, Any]) -> np.ndarray:
        z = references.dot_general_reference(arrays["lhs"], arrays["rhs"], self._numbers())
        for name in ("bias", "add"):
            z = z + np.asarray(arrays.get(name, 0)).astype(np.float64)
        return z

    def wanted_results(self, arrays: Mapping[str, Any]) -> list[tuple]:
        z = self._pre_activation(arrays)
        squares = references.dot_general_reference(
            np.square(np.asarray(arrays["lhs"], np.float64)),
            np.square(np.asarray(arrays["rhs"], np.float64)),
            self._numbers(),
        )
        scale = np.sqrt(squares).max(initial=0)
        value = references.activation_reference(z, self.activation)
        return [("value", value, scale, self.reduced, 4 if self.activation else 2)]

    def wanted_gradients(self, arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> list:
        c = np.asarray(cotangents[0], np.float64)
        z = self._pre_activation(arrays)
        dz = c * references.activation_slope_reference(z, self.activation)
        lhs, rhs = arrays["lhs"], arrays["rhs"]
        exact = references.dot_general_vjp_reference(dz, lhs, rhs, self._numbers())
        squares = references.dot_general_vjp_reference(
            np.square(c),
            np.square(np.asarray(lhs, np.float64)),
            np.square(np.asarray(rhs, np.float64)),
            self._numbers(),
        )
        rows = max(z.size, 1)
        roundings = 6 if self.activation else 3
        out = [
            (n, e, np.sqrt(s).max(initial=0), rows + self.reduced, roundings)
            for n, e, s in zip(("lhs", "rhs"), exact, squares, strict=True)
        ]
        over = tuple(range(z.ndim - len(self.rhs_free)))
        if self.bias:
            scale = np.sqrt(np.square(c).sum(over)).max(initial=0)
            out.append(("bias", dz.sum(over), scale, rows, roundings))
        if self.add:
            out.append(("add", dz, np.abs(c).max(initial=0), self.reduced, roundings))
        return out


@st.composite
def products(draw: Draw, setting: Setting, dtypes: tuple[str, ...] | None = None) -> Product:
    op = draw(st.sampled_from(["gemm", "dot_general"]))
    sizes = dict(setting.sizes)
    counts = [draw(st.integers(0, 2)) if op == "dot_general" else 0]
    counts += [draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(1, 3))]
    labels = [
        f"{kind}{n}" for kind, count in zip("blrk", counts, strict=True) for n in range(count)
    ]
    size = {label: draw(st.sampled_from(SIZES)) for label in labels}
    at = [tuple(draw(st.permutations([s for s in labels if s[0] in k]))) for k in ("blk", "brk")]
    batch, k = ([s for s in labels if s[0] == kind] for kind in "bk")
    k = draw(st.permutations(k))
    free = [[s for s in side if s[0] == kind] for side, kind in zip(at, "lr", strict=True)]
    dims = {"lhs": at[0], "rhs": at[1], "bias": tuple(free[1])}
    dims["out"] = dims["add"] = (*batch, *free[0], *free[1])
    shapes = {name: tuple(size[s] for s in of) for name, of in dims.items()}

    maps = _mapped(draw, size, setting)
    mapped = {name: tuple(maps[s] for s in of) for name, of in dims.items()}
    specs = {
        name: draw_spec(
            draw,
            shape,
            sizes,
            setting.free,
            uneven=setting.uneven and name != "out",
            cut=[math.prod(sizes[a] for a in axes) for axes in mapped[name]],
        )
        for name, shape in shapes.items()
    }
    epilogue = op == "gemm" and not any(maps[s] for s in k)
    dtype = draw(st.sampled_from(dtypes or setting.dtypes))
    like: list[Dims] = [(), ()]
    if op == "gemm":
        like = [tuple(d for d in range(len(side)) if draw(st.booleans())) for side in at]
    return Product(
        op=op,
        lhs=shapes["lhs"],
        rhs=shapes["rhs"],
        contracting=_places(k, at),
        batch=_places(batch, at),
        specs=tuple(specs.items()),
        mapped=tuple(mapped.items()),
        dtype=dtype,
        out_dtype=draw(st.sampled_from([None, "float32"])) if dtypes is None else None,
        bias=epilogue and draw(st.booleans()),
        add=epilogue and draw(st.booleans()),
        activation=draw(st.sampled_from([None, "gelu", "silu", "relu"])) if epilogue else None,
        batch_like=(like[0], like[1]),
        wanted=draw(st.sampled_from([None, "cheapest", "spec"])) if setting.free else None,
    )


def _places(labels: list[str], at: list[tuple[str, ...]]) -> Pair:
    left, right = (tuple(side.index(s) for s in labels) for side in at)
    return left, right


def _mapped(draw: Draw, size: Mapping[str, int], setting: Setting) -> dict[str, tuple[str, ...]]:
    """Which mapped axes cut each label; an axis on none leaves its devices with the same."""
    labels = list(size)
    spec = draw_spec(draw, list(size.values()), dict(setting.sizes), setting.manual)
    return dict(zip(labels, spec, strict=True))
