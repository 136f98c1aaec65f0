"""Drawn softmaxes: any dims, layouts, masks and dtypes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh

from shardops.primitives.softmax import softmax
from tests import cases
from tests.fuzz.settings import SIZES, Draw, Setting, Spec, draw_spec, joined, to_p
from tests.primitives import test_softmax_reference as reference


@dataclasses.dataclass(frozen=True)
class Softmax:
    """One softmax. A shard_map maps dims before the queries: those decide what a query sees."""

    shape: tuple[int, ...]
    mask_shape: tuple[int, ...]
    specs: tuple[tuple[str, Spec], ...]
    mapped: tuple[tuple[str, Spec], ...]
    dtype: str = "float32"
    masked: bool = False
    causal: str | None = None
    scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return ("x", "mask") if self.masked else ("x",)

    def spec(self, name: str) -> Spec:
        return joined(dict(self.mapped)[name], dict(self.specs)[name])

    def arrays(self, rng: np.random.Generator) -> dict[str, Any]:
        arrays = {"x": cases.random(rng, self.shape, self.dtype, 2.0)}
        return arrays | ({"mask": rng.random(self.mask_shape) < 0.3} if self.masked else {})

    def cotangents(self, rng: np.random.Generator, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        del arrays
        return (cases.random(rng, self.shape, self.dtype),)

    def call(self, setting: Setting, mesh: Mesh, arrays: Mapping[str, jax.Array]) -> Any:
        if not setting.manual:
            return softmax(**arrays, **self._options)
        specs = {n: to_p(dict(self.mapped)[n]) for n in self.names}
        return jax.shard_map(
            lambda arrays: softmax(**arrays, **self._options),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs["x"],
            axis_names=set(setting.manual),
            check_vma=setting.check_vma,
        )(dict(arrays))

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "causal": self.causal}

    def wanted_results(self, arrays: Mapping[str, Any]) -> list[tuple]:
        y = reference.softmax_reference(**arrays, **self._options)
        return [("y", y, 0.0, self.shape[-1], 1)]

    def wanted_gradients(self, arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> list:
        dx = reference.softmax_vjp_reference(cotangents[0], **arrays, **self._options)
        y = reference.softmax_reference(**arrays, **self._options)
        dy = np.abs(np.asarray(cotangents[0], np.float64))
        scale = abs(self.scale) * float(y.max(initial=0)) * float(dy.max(initial=0))
        return [("x", dx, scale, self.shape[-1], 3)]


@st.composite
def softmaxes(draw: Draw, setting: Setting) -> Softmax:
    batch = [draw(st.sampled_from(SIZES)) for _ in range(draw(st.sampled_from([1, 2, 0])))]
    shape = (*batch, draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES)))
    mask = tuple(n if draw(st.booleans()) else 1 for n in shape)
    sizes = dict(setting.sizes)
    mapped = (*draw_spec(draw, batch, sizes, setting.manual), (), ())
    of_mask = tuple(m if n > 1 else () for m, n in zip(mapped, mask, strict=True))

    def spec(shape: tuple[int, ...], mapped: Spec) -> Spec:
        cut = [math.prod(sizes[a] for a in axes) for axes in mapped]
        return draw_spec(draw, shape, sizes, setting.free, uneven=setting.uneven, cut=cut)

    return Softmax(
        shape=shape,
        mask_shape=mask,
        specs=(("x", spec(shape, mapped)), ("mask", spec(mask, of_mask))),
        mapped=(("x", mapped), ("mask", of_mask)),
        dtype=draw(st.sampled_from(setting.dtypes)),
        masked=draw(st.booleans()),
        causal=draw(st.sampled_from([None, "upper_left", "bottom_right"])),
        scale=draw(st.sampled_from([1.0, 0.125, -0.5])),
    )
