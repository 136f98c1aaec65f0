"""Drawn norms: any rows, row lengths, layouts, dtypes, statistics and options."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh

from tests import calls
from tests.cases import NormCase
from tests.fuzz.settings import SIZES, Draw, Setting, Spec, draw_spec, joined, to_p

ROW_LENGTHS = (8, 16, 24, 64, 1, 7, 48, 96)


@dataclasses.dataclass(frozen=True)
class Norm:
    """One norm. A shard_map maps rows alone: whoever maps a row sees a part of it."""

    op: str
    shape: tuple[int, ...]
    specs: tuple[tuple[str, Spec], ...]  # over the axes that the op sees
    mapped: tuple[tuple[str, Spec], ...]
    dtype: str = "float32"
    gamma_dtype: str | None = None
    beta: bool = False
    add: bool = False
    return_input: bool = False
    zero_centered_gamma: bool = False
    stats: str = "auto"

    @property
    def case(self) -> NormCase:
        return NormCase(
            "",
            self.shape,
            gamma_dtype=self.gamma_dtype,
            beta=self.beta,
            add=self.add,
            return_input=self.return_input,
            zero_centered_gamma=self.zero_centered_gamma,
            # The variance of very few numbers may be tiny, and then its root says nothing.
            epsilon=1e-6 if self.shape[-1] > 8 else 0.1,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return ("x", "gamma", *(("beta",) * self.beta), *(("add",) * self.add))

    def spec(self, name: str) -> Spec:
        return joined(dict(self.mapped)[name], dict(self.specs)[name])

    def arrays(self, rng: np.random.Generator) -> dict[str, Any]:
        return dict(calls.norm_arrays(self.op, self.case, rng, self.dtype)[0])

    def cotangents(self, rng: np.random.Generator, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        del arrays
        return calls.norm_arrays(self.op, self.case, rng, self.dtype)[1]

    def call(self, setting: Setting, mesh: Mesh, arrays: Mapping[str, jax.Array]) -> Any:
        op = calls.norm(self.op, self.case, stats=self.stats)
        if not setting.manual:
            return op(**arrays)
        rows = to_p(dict(self.mapped)["x"])
        return jax.shard_map(
            lambda arrays: op(**arrays),
            mesh=mesh,
            in_specs=({n: to_p(dict(self.mapped)[n]) for n in self.names},),
            out_specs=(rows, rows) if self.return_input else rows,
            axis_names=set(setting.manual),
            check_vma=setting.check_vma,
        )(dict(arrays))

    # ---- what is right, each with the size of the numbers that are added -------------------------

    def wanted_results(self, arrays: Mapping[str, Any]) -> list[tuple]:
        value, _ = self._wanted(arrays, self._zeros())
        length = self.shape[-1]
        gamma = np.asarray(arrays["gamma"], np.float64) + self.zero_centered_gamma
        out = [("y", value.y, np.abs(gamma).max(), length, 2)]
        return out + ([("h", value.h, 0.0, 1, 1)] if self.return_input else [])

    def wanted_gradients(self, arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> list:
        value, exact = self._wanted(arrays, cotangents)
        length, rows = self.shape[-1], self.case.rows
        dy = np.asarray(cotangents[0], np.float64)
        gamma = np.asarray(arrays["gamma"], np.float64) + self.zero_centered_gamma
        centred = value.h - value.h.mean(-1, keepdims=True) * (self.op == "layer_norm")
        rstd = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.case.epsilon)
        over = tuple(range(dy.ndim - 1))
        sums = {
            "x": np.abs(dy * gamma * rstd),
            "gamma": np.sqrt(np.square(dy * centred * rstd).sum(over)),
            "beta": np.sqrt(np.square(dy).sum(over)),
        }
        reduced = {"x": length, "gamma": rows + length, "beta": rows}
        out = []
        for name in self.names:
            key = "x" if name == "add" else name
            out.append((name, getattr(exact, key), sums[key].max(), reduced[key], 2))
        return out

    def _wanted(self, arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> Any:
        return calls.norm_wanted(self.op, self.case, dict(arrays), cotangents)

    def _zeros(self) -> tuple[np.ndarray, ...]:
        return (np.zeros(self.shape),) * (1 + self.return_input)


@st.composite
def norms(draw: Draw, setting: Setting) -> Norm:
    op = draw(st.sampled_from(["layer_norm", "rms_norm"]))
    rows = [draw(st.sampled_from(SIZES)) for _ in range(draw(st.sampled_from([2, 1, 3, 0])))]
    shape = (*rows, draw(st.sampled_from(ROW_LENGTHS)))
    sizes = dict(setting.sizes)
    mapped = (*draw_spec(draw, rows, sizes, setting.manual), ())
    cut = [int(np.prod([sizes[a] for a in axes])) for axes in mapped]

    def spec(shape: tuple[int, ...], cut: list[int]) -> Spec:
        return draw_spec(draw, shape, sizes, setting.free, uneven=setting.uneven, cut=cut)

    drawn = {"x": spec(shape, cut), "add": spec(shape, cut)}
    drawn |= {name: spec(shape[-1:], [1]) for name in ("gamma", "beta")}
    return Norm(
        op=op,
        shape=shape,
        specs=tuple(drawn.items()),
        mapped=(("x", mapped), ("add", mapped), ("gamma", ((),)), ("beta", ((),))),
        dtype=draw(st.sampled_from(setting.dtypes)),
        gamma_dtype=draw(st.sampled_from([None, "float32"])),
        beta=op == "layer_norm" and draw(st.booleans()),
        add=draw(st.booleans()),
        return_input=draw(st.booleans()),
        zero_centered_gamma=draw(st.booleans()),
        stats=draw(st.sampled_from(["auto", "gather", "distributed"])),
    )
