"""Drawn products of quantised operands: numbers that every format and every scale hold exactly."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

import shardops as so
from tests.fuzz.products import Product, products
from tests.fuzz.settings import Draw, Setting
from tests.quantize.quantisers import FORMATS, LAYOUTS, RECIPES, ROLES

Settings = tuple[str, str, str, str]  # recipe, format, role, layout


@dataclasses.dataclass(frozen=True)
class QuantisedProduct(Product):
    """A product, of which one or both operands are quantised; its gradient is that of a plain one.

    Operands are powers of two of either sign: quantised by any of the recipes they stay what they
    are, on any shard.
    """

    quantised: tuple[tuple[str, Settings], ...] = ()

    def arrays(self, rng: np.random.Generator) -> dict[str, Any]:
        arrays = super().arrays(rng)
        for name in ("lhs", "rhs"):
            shape = arrays[name].shape
            values = np.exp2(rng.integers(-3, 3, shape)) * rng.choice([-1.0, 1.0], shape)
            arrays[name] = values.astype(arrays[name].dtype)
        return arrays

    def _op(self, arrays: Mapping[str, Any]) -> jax.Array:
        given = dict(arrays)
        for name, (recipe, format, role, layout) in self.quantised:
            quantizer = RECIPES[recipe].quantizer(role, layout)
            given[name] = so.quantize(given[name], dataclasses.replace(quantizer, format=format))
        return super()._op(given)


@st.composite
def quantised_products(draw: Draw, setting: Setting) -> QuantisedProduct:
    product = draw(products(setting))
    names = draw(st.sampled_from([("lhs", "rhs"), ("lhs", "rhs"), ("lhs",), ("rhs",)]))
    quantised = []
    recipe = draw(st.sampled_from([*RECIPES]))
    for name in names:
        rank = len(product.shape(name))
        of_name = recipe if draw(st.integers(0, 3)) else draw(st.sampled_from([*RECIPES]))
        if rank == 0 and of_name in ("block", "mxfp8"):
            of_name = "current"
        role = draw(st.sampled_from(ROLES if rank > 1 else ("input", "gradient")))
        layout = draw(st.sampled_from(LAYOUTS if rank > 1 else ("rows",)))
        format = draw(st.sampled_from([*FORMATS]))
        quantised.append((name, (of_name, format, role, layout)))
    fields = {f.name: getattr(product, f.name) for f in dataclasses.fields(product)}
    return QuantisedProduct(**fields, quantised=tuple(quantised))
