"""What MaxText wants of a quantisation: an object that makes modules for its dense layers.

    model = transformer_as_linen(config, mesh, quant=Quantization(so.recipes.DelayedScaling()))

It has no need of MaxText itself.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from shardops.layers import states
from shardops.layers.linen.dot_general import DotGeneral, Einsum


@dataclass(frozen=True)
class Quantization:
    """In the place of MaxText's own `Quantization` objects.

    Args:
      recipe: of `so.recipes`; None: products by `so.dot_general`, of the operands as they are.
      quant_mode: MaxText asks for it; this is for training alone.
    """

    recipe: Any = None
    quant_mode: str = "train"

    needs_apply_rngs: ClassVar[bool] = False

    def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> Any:
        """What makes the module of one dense layer. Operands say themselves how they lie."""
        del mesh_axes
        return functools.partial(DotGeneral, recipe=self.recipe)

    def einsum(self, dtype: Any = None, mesh_axes: tuple[str, ...] = ()) -> Einsum:
        """The module of a mixture of experts' products.

        Their experts are a batch dim, which `so.dot_general` multiplies as it is.
        """
        del dtype, mesh_axes
        stateful = states.fresh("Quantization", self.recipe) is not None
        return Einsum(None if stateful else self.recipe)

    def get_block_size(self) -> int:
        """Elements that a scale covers along the contracted dim; 1 where it covers all."""
        quantizers = states.quantizers("Quantization", self.recipe, states.fresh("", self.recipe))
        block = None if quantizers is None else quantizers.input.block
        return 1 if block is None else max(block)
